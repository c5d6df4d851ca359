//! Data under credit (packed.md, Inline), as a sink counts it.

use crate::enums::ErrorCode;
use crate::error::{Error, Result};

/// The credit of one epoch, which all streams of a session share.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Credit {
    /// Bytes that were granted in all.
    pub total: u64,
    /// Bytes of Data that came under it.
    pub counted: u64,
}

/// The packed stream of one transfer, as it comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Inline {
    /// Bytes of the whole stream: those of the copy program.
    pub length: u64,
    /// Bytes that have been unpacked.
    pub unpacked: u64,
    /// Whether a Data of it was refused, which ends the transfer: all that follows is counted and dropped.
    pub ended: bool,
}

impl Inline {
    /// A stream of this length, of which nothing has come.
    pub fn new(length: u64) -> Inline {
        Inline { length, unpacked: 0, ended: false }
    }

    /// Whether all of it has come.
    pub fn complete(&self) -> bool {
        self.unpacked == self.length && !self.ended
    }

    /// Counts the Data of `bytes` bytes at `offset`; true if they are to be unpacked, false if they are dropped.
    ///
    /// # Errors
    ///
    /// `CREDIT` at `data` if they are beyond the total, `OUT_OF_RANGE` at `offset` if they are not the next ones,
    /// `FIELD_CONFLICT` at `last` if that does not tell the end of the stream.
    pub fn take(&mut self, credit: &mut Credit, offset: u64, bytes: u64, last: bool) -> Result<bool> {
        let taken = self.checked(credit, offset, bytes, last);
        if taken.is_err() {
            self.ended = true;
        }
        taken
    }

    fn checked(&mut self, credit: &mut Credit, offset: u64, bytes: u64, last: bool) -> Result<bool> {
        let (left, rest) = (credit.total.saturating_sub(credit.counted), self.length - self.unpacked);
        if bytes > left {
            if self.ended {
                return Ok(false);
            }
            return Err(Error::at(ErrorCode::CREDIT, "data").between(left, bytes));
        }
        credit.counted += bytes;
        if self.ended {
            return Ok(false);
        }
        if offset != self.unpacked || bytes > rest {
            return Err(Error::at(ErrorCode::OUT_OF_RANGE, "offset").between(self.unpacked, offset));
        }
        if last != (bytes == rest) {
            return Err(Error::at(ErrorCode::FIELD_CONFLICT, "last").between(bytes == rest, last));
        }
        self.unpacked += bytes;
        Ok(true)
    }
}
