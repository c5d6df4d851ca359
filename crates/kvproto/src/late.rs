//! Windows that begin late (lowering.md).

use crate::body::Body;
use crate::description::{ceil, Group};
use crate::enums::{ErrorCode, ItemKind};
use crate::error::{Error, Result};
use crate::messages::Grants;
use alloc::collections::BTreeSet;
use alloc::vec;
use alloc::vec::Vec;

impl Group {
    /// The window that a source serves of one that a sink asks for, if it holds rows from token `since` on: the highest
    /// such token of its groups from which this one is filled. Of pages, items begin with the one of its first row.
    ///
    /// # Errors
    ///
    /// `BAD_GRANT` if the window begins inside a row or inside an item that moves whole; `NOT_HELD` if it begins too
    /// early and does not say `late`; both at `first`.
    pub fn serve(&self, grant: &Grants, since: u64, cp_rank: u32) -> Result<Grants> {
        grant.to_record().check()?;
        self.check_begin(grant.first, grant.count, cp_rank.into())?;
        let begins = self.begins(since);
        let mut window = grant.clone();
        if self.kind == ItemKind::Handoff || grant.count == 0 || begins <= grant.first {
            return Ok(window);
        }
        if grant.late != Some(true) {
            return Err(Error::at(ErrorCode::NOT_HELD, "first").between(begins, grant.first));
        }
        let end = grant.first + grant.count;
        window.first = begins.min(end);
        window.count = end - window.first;
        if self.kind == ItemKind::Page {
            window.items = Some(self.kept(grant, &window, cp_rank.into()));
        }
        Ok(window)
    }

    /// The first token at which a window may begin, where rows below `since` are gone.
    fn begins(&self, since: u64) -> u64 {
        let rounded = |token: u64, period: u64| ceil(token, period).saturating_mul(period);
        if !self.opaque() {
            return rounded(since, self.step);
        }
        if self.cp_size == 1 {
            return rounded(since, self.rows * self.step);
        }
        // After so many turns every cp rank has filled its items.
        let places = if self.order.is_empty() { vec![1] } else { self.turns.iter().map(|turn| turn.1).collect() };
        let rows: BTreeSet<u64> = places.into_iter().map(|many: u64| many * self.interleave / self.step).collect();
        let turns = rows.into_iter().fold(1, |turns, rows| {
            let each = self.rows / common(self.rows, rows);
            turns / common(turns, each) * each
        });
        let period = turns.saturating_mul(self.places() * self.interleave);
        self.origin.saturating_add(rounded(since.saturating_sub(self.origin), period))
    }

    /// Items of a window that begins later, from the one that holds its first row.
    fn kept(&self, asked: &Grants, window: &Grants, cp_rank: u64) -> Vec<u32> {
        let below = |row| self.rows_below(row, cp_rank);
        let (before, _) = self.rows_of(asked.first, asked.count);
        let (begin, end) = self.rows_of(window.first, window.count);
        if below(begin) == below(end) {
            return Vec::new();
        }
        let gone = below(begin) / self.rows - below(before) / self.rows;
        asked.items.iter().flatten().skip(gone as usize).copied().collect()
    }
}

fn common(a: u64, b: u64) -> u64 {
    if b == 0 {
        a
    } else {
        common(b, a % b)
    }
}
