//! The one error of this crate.

use crate::enums::ErrorCode;
use alloc::borrow::ToOwned;
use alloc::format;
use alloc::string::{String, ToString};
use core::fmt;

/// A refusal: the code of the registry, where it is, and what each side has.
///
/// `code` and `path` are those that every implementation gives, and what Refused, Error and Failed carry. `mine` and
/// `yours` are words for people: what this side expects, and what it got. Neither has a text or bytes of a frame, which
/// may be secret, but what Descriptions state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    /// Reason for the refusal.
    pub code: ErrorCode,
    /// Place of the fault, as a path of registry names; empty: the whole value.
    pub path: String,
    /// What this side expects or has; empty where the code says all.
    pub mine: String,
    /// What it got; empty where the code says all.
    pub yours: String,
}

/// A value, or the refusal of it.
pub type Result<T> = core::result::Result<T, Error>;

impl Error {
    /// A refusal at a place, without words.
    pub fn at(code: ErrorCode, path: &str) -> Error {
        Error { code, path: path.to_owned(), mine: String::new(), yours: String::new() }
    }

    /// The same with what each side has.
    pub fn between(self, mine: impl ToString, yours: impl ToString) -> Error {
        Error { mine: mine.to_string(), yours: yours.to_string(), ..self }
    }

    /// The same inside a field or an element, of which the step is put before its path.
    pub fn under(self, step: &str) -> Error {
        let dot = if self.path.is_empty() || self.path.starts_with('[') { "" } else { "." };
        Error { path: format!("{}{}{}", step, dot, self.path), ..self }
    }

    pub(crate) fn index(self, index: usize) -> Error {
        self.under(&format!("[{}]", index))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.code)?;
        if !self.path.is_empty() {
            write!(f, " at {}", self.path.escape_debug())?;
        }
        if !self.mine.is_empty() || !self.yours.is_empty() {
            write!(f, ": expected {}, got {}", self.mine.escape_debug(), self.yours.escape_debug())?;
        }
        Ok(())
    }
}

#[cfg(feature = "std")]
impl std::error::Error for Error {}

pub(crate) fn refuse<T>(code: ErrorCode) -> Result<T> {
    Err(Error::at(code, ""))
}

pub(crate) fn refuse_at<T>(code: ErrorCode, path: &str) -> Result<T> {
    Err(Error::at(code, path))
}

pub(crate) fn refuse_if(bad: bool, code: ErrorCode) -> Result<()> {
    if bad {
        refuse(code)
    } else {
        Ok(())
    }
}
