//! Tokens over ranks (dcp.md), and the rows of a window (lowering.md).

use crate::description::{ceil, Group};

impl Group {
    /// Runs after which the deal repeats.
    pub fn places(&self) -> u64 {
        if self.cp_size == 1 || self.order.is_empty() {
            self.cp_size
        } else {
            self.order.len() as u64
        }
    }

    /// The cp rank that takes the run at this place of the deal.
    pub fn place(&self, i: u64) -> u64 {
        if self.cp_size == 1 || self.order.is_empty() {
            i
        } else {
            self.order[i as usize]
        }
    }

    /// How many of the first places are of a cp rank.
    fn before(&self, i: u64, rank: u64) -> u64 {
        if self.cp_size == 1 || self.order.is_empty() {
            (rank < i).into()
        } else {
            self.order[..i as usize].iter().filter(|it| **it == rank).count() as u64
        }
    }

    /// The cp rank that owns a token, and its local row.
    pub fn owner(&self, token: u64) -> Option<(u64, u64)> {
        if self.cp_size == 1 {
            return Some((0, token / self.step));
        }
        let x = token.checked_sub(self.origin)?;
        let (i, turn) = ((x / self.interleave) % self.places(), self.interleave * self.places());
        let rank = self.place(i);
        let (m, k) = (self.before(self.places(), rank), self.before(i, rank));
        Some((rank, ((x / turn * m + k) * self.interleave + x % self.interleave) / self.step))
    }

    /// Tokens below one that a cp rank owns.
    pub fn tokens_below(&self, token: u64, rank: u64) -> u64 {
        if self.cp_size == 1 {
            return token;
        }
        let (x, turn) = (token.saturating_sub(self.origin), self.interleave * self.places());
        let (i, rest) = (x % turn / self.interleave, x % self.interleave);
        let last = if self.place(i) == rank { rest } else { 0 };
        (x / turn * self.before(self.places(), rank) + self.before(i, rank)) * self.interleave + last
    }

    /// Global rows of a window, the first and the one after the last.
    pub fn rows_of(&self, first: u64, count: u64) -> (u64, u64) {
        let end = first + count;
        match (self.partial, count) {
            (true, 0) => (ceil(first, self.step), ceil(first, self.step)),
            (true, _) => (first / self.step, ceil(end, self.step)),
            _ => (ceil(first, self.step), (end / self.step).max(ceil(first, self.step))),
        }
    }

    /// Rows below a global row that a cp rank owns.
    pub fn rows_below(&self, row: u64, cp_rank: u64) -> u64 {
        self.tokens_below(row * self.step, cp_rank) / self.step
    }

    /// The global row of a local one.
    pub fn global(&self, local: u64, cp_rank: u64) -> u64 {
        if self.cp_size == 1 {
            return local;
        }
        let mine: Vec<u64> = (0..self.places()).filter(|i| self.place(*i) == cp_rank).collect();
        let (token, many) = (local * self.step, mine.len() as u64);
        let (turn, rest) = (token / (self.interleave * many), token % (self.interleave * many));
        let place = turn * self.places() + mine[(rest / self.interleave) as usize];
        (self.origin + place * self.interleave + rest % self.interleave) / self.step
    }
}
