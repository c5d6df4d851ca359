//! Version and features of a session (negotiation.md).

use crate::enums::{ErrorCode, Feature};
use crate::error::{Error, Result};
use alloc::format;
use alloc::vec::Vec;

/// Minor versions of one major.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Versions {
    /// Major version.
    pub major: u8,
    /// Lowest minor.
    pub lowest: u8,
    /// Highest minor.
    pub highest: u8,
}

/// What one side says of itself: in Hello the sink, and in Welcome or Refused the source answers.
#[derive(Clone, Debug)]
pub struct Terms {
    /// Versions that it speaks, in order of preference.
    pub versions: Vec<Versions>,
    /// Features that it can use.
    pub offered: Vec<Feature>,
    /// Features without which it refuses the session.
    pub needed: Vec<Feature>,
}

/// What a session has been agreed on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Agreement {
    /// Major version.
    pub major: u8,
    /// Minor version.
    pub minor: u8,
    /// Features of the session, ascending.
    pub features: Vec<Feature>,
}

/// The version and the features of a session, or the source's refusal of Hello.
///
/// # Errors
///
/// `NO_VERSION` at `versions`, `FEATURE_MISSING` at `needed` or `offered`.
pub fn negotiate(sink: &Terms, source: &Terms) -> Result<Agreement> {
    let common = sink.versions.iter().find_map(|asked| {
        let meets =
            |it: &&Versions| it.major == asked.major && it.lowest <= asked.highest && asked.lowest <= it.highest;
        source.versions.iter().find(meets).map(|it| (it.major, it.highest.min(asked.highest)))
    });
    let (major, minor) = match common {
        Some(version) => version,
        None => {
            let said = |terms: &Terms| format!("{:?}", terms.versions);
            return Err(Error::at(ErrorCode::NO_VERSION, "versions").between(said(source), said(sink)));
        }
    };
    let missing = |needed: &[Feature], offered: &[Feature]| needed.iter().copied().find(|it| !offered.contains(it));
    if let Some(feature) = missing(&sink.needed, &source.offered) {
        return Err(Error::at(ErrorCode::FEATURE_MISSING, "needed").between("", feature));
    }
    if let Some(feature) = missing(&source.needed, &sink.offered) {
        return Err(Error::at(ErrorCode::FEATURE_MISSING, "offered").between(feature, ""));
    }
    let mut features: Vec<Feature> = sink.offered.iter().copied().filter(|it| source.offered.contains(it)).collect();
    features.sort_unstable();
    Ok(Agreement { major, minor, features })
}
