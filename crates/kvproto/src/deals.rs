//! Tokens over ranks (dcp.md), and the rows of a window (lowering.md).

use crate::description::{ceil, Group};
use crate::enums::ItemKind;
use alloc::vec::Vec;

impl Group {
    /// The cp rank that owns a token, and its local row there; none if nobody does.
    pub fn owner(&self, token: u64) -> Option<(u32, u64)> {
        let (rank, row) = self.owner_of(token)?;
        Some((rank as u32, row))
    }

    /// Complete rows below a token, of each cp rank.
    pub fn lengths(&self, token: u64) -> Vec<u64> {
        (0..self.cp_size).map(|rank| self.tokens_below(token, rank) / self.step).collect()
    }

    /// Pages of a table that all cp ranks share, below a token.
    pub fn pages(&self, token: u64) -> u64 {
        ceil(self.lengths(token).into_iter().max().unwrap_or(0), self.rows)
    }

    /// The slot of a token on a cp rank, by the rank's table of items; none if another rank has it, or no item does.
    pub fn slot(&self, token: u64, cp_rank: u32, items: &[u32]) -> Option<u64> {
        let (_, row) = self.owner_of(token).filter(|owner| owner.0 == u64::from(cp_rank))?;
        let item: u64 = (*items.get(usize::try_from(row / self.rows).ok()?)?).into();
        Some(item * self.rows + row % self.rows)
    }

    /// Items that a window of tokens needs on a cp rank (lowering.md, Items).
    pub fn items(&self, first: u64, count: u64, cp_rank: u32) -> u64 {
        match self.kind {
            ItemKind::Handoff => 0,
            ItemKind::Slot | ItemKind::Ring => 1,
            ItemKind::Page => {
                let (begin, end) = self.rows_of(first, count);
                let (begin, end) = (self.rows_below(begin, cp_rank.into()), self.rows_below(end, cp_rank.into()));
                if begin < end {
                    (end - 1) / self.rows - begin / self.rows + 1
                } else {
                    0
                }
            }
        }
    }

    /// Runs after which the deal repeats.
    pub(crate) fn places(&self) -> u64 {
        if self.order.is_empty() {
            self.cp_size
        } else {
            self.order.len() as u64
        }
    }

    /// The cp rank that takes the run at this place of the deal.
    pub(crate) fn place(&self, i: u64) -> u64 {
        if self.order.is_empty() {
            i
        } else {
            self.order[i as usize]
        }
    }

    /// How many of the first places are of a cp rank.
    fn before(&self, i: u64, rank: u64) -> u64 {
        if self.order.is_empty() {
            (rank < i).into()
        } else {
            self.order[..i as usize].iter().filter(|it| **it == rank).count() as u64
        }
    }

    pub(crate) fn owner_of(&self, token: u64) -> Option<(u64, u64)> {
        if self.cp_size == 1 {
            return Some((0, token / self.step));
        }
        let x = token.checked_sub(self.origin)?;
        let (i, turn) = ((x / self.interleave) % self.places(), self.interleave * self.places());
        let rank = self.place(i);
        let (k, m) = self.turns.get(i as usize).copied().unwrap_or((0, 1));
        Some((rank, ((x / turn * m + k) * self.interleave + x % self.interleave) / self.step))
    }

    /// Tokens from a token on, up to the end of its run of the deal.
    pub(crate) fn rest_of_run(&self, token: u64) -> u64 {
        match token.checked_sub(self.origin) {
            _ if self.cp_size == 1 => u64::MAX,
            Some(x) => self.interleave - x % self.interleave,
            None => self.origin - token,
        }
    }

    /// Tokens below one that a cp rank owns.
    fn tokens_below(&self, token: u64, rank: u64) -> u64 {
        if self.cp_size == 1 {
            return token;
        }
        let (x, turn) = (token.saturating_sub(self.origin), self.interleave * self.places());
        let (i, rest) = (x % turn / self.interleave, x % self.interleave);
        let last = if self.place(i) == rank { rest } else { 0 };
        (x / turn * self.before(self.places(), rank) + self.before(i, rank)) * self.interleave + last
    }

    /// Global rows of a window, the first and the one after the last.
    pub(crate) fn rows_of(&self, first: u64, count: u64) -> (u64, u64) {
        let end = first.saturating_add(count);
        let begin = ceil(first, self.step);
        match (self.partial, count) {
            (true, 0) => (begin, begin),
            (true, _) => (first / self.step, ceil(end, self.step)),
            _ => (begin, (end / self.step).max(begin)),
        }
    }

    /// Rows below a global row that a cp rank owns.
    pub(crate) fn rows_below(&self, row: u64, cp_rank: u64) -> u64 {
        self.tokens_below(row.saturating_mul(self.step), cp_rank) / self.step
    }

    /// The global row of a local one; none if it is beyond all tokens.
    pub(crate) fn global(&self, local: u64, cp_rank: u64) -> Option<u64> {
        if self.cp_size == 1 {
            return Some(local);
        }
        let mine: Vec<u64> = (0..self.places()).filter(|i| self.place(*i) == cp_rank).collect();
        let (token, own) = (local.checked_mul(self.step)?, self.interleave * mine.len() as u64);
        let (turn, rest) = (token.checked_div(own)?, token % own);
        let place = turn.checked_mul(self.places())? + mine[(rest / self.interleave) as usize];
        let token = self.origin.checked_add(place.checked_mul(self.interleave)? + rest % self.interleave)?;
        Some(token / self.step)
    }
}
