//! Windows that begin late: lowering.md.

use crate::codec::{refuse_at, result, to_json, uint_from_json, Json, Map, Value};
use crate::description::*;
use crate::lower::Window;
use crate::uints;
use std::collections::BTreeSet;

pub fn late(question: &Json) -> Option<String> {
    let cp_rank = uint_from_json(question.get("cp_rank")?).ok()?;
    let since = uints(question.get("since")?)?.into_iter().max().unwrap_or(0);
    let grant = question.get("grant")?;
    let both = read("Group", question.get("group")?).and_then(|group| Ok((group, read("Grants", grant)?)));
    Some(match both {
        Err(refusal) => result::<()>(Err(refusal), |_, _| ()),
        Ok(((layout, record), (shape, mut grant))) => {
            let group = Group::of(&Map { layout, record: &record });
            let (window, asked) = {
                let map = Map { layout: shape, record: &grant };
                (Window::of(&map), truth(&map, "late"))
            };
            let begins = group.begins(since);
            let rows = group.kind == PAGE || group.kind == RING;
            let inside = rows && window.count > 0 && window.first % group.step > 0;
            let cut = group.kind != HANDOFF && begins > window.first;
            let served = match cut {
                _ if inside => refuse_at("BAD_GRANT", "grants[0].first"),
                true if !asked => refuse_at("NOT_HELD", "grants[0].first"),
                true => Ok(Some(begins.min(window.first + window.count))),
                false => Ok(None),
            };
            result(served, |begins, out| {
                if let Some(first) = begins {
                    let count = window.first + window.count - first;
                    let mut set = |field: &str, value| {
                        if let Some(place) = shape.place(field) {
                            grant[place] = Some(value);
                        }
                    };
                    set("first", Value::Uint(first));
                    set("count", Value::Uint(count));
                    if group.kind == PAGE {
                        set("items", Value::Array(group.kept(&window, first, cp_rank)));
                    }
                    if first > window.first {
                        out.push_str(&format!("\"begins\": \"{first}\", "));
                    }
                }
                out.push_str("\"window\": ");
                to_json(shape, &grant, out);
            })
        }
    })
}

impl Group {
    /// The first token at which a window may begin, where rows below `since` are gone.
    fn begins(&self, since: u64) -> u64 {
        let row = ceil(since, self.step) * self.step;
        if !self.opaque() {
            return row;
        }
        if self.cp_size == 1 {
            let item = self.rows * self.step;
            return ceil(since, item) * item;
        }
        // After so many turns every cp rank has filled its items.
        let own = |rank| (0..self.places()).filter(|i| self.place(*i) == rank).count() as u64;
        let rows: BTreeSet<u64> = (0..self.cp_size).map(|rank| own(rank) * self.interleave / self.step).collect();
        let turns = rows.into_iter().fold(1, |turns, rows| {
            let each = self.rows / common(self.rows, rows);
            turns / common(turns, each) * each
        });
        let period = turns * self.places() * self.interleave;
        self.origin + ceil(since.saturating_sub(self.origin), period) * period
    }

    /// Items of a window that begins later, from the one that holds its first row.
    fn kept(&self, window: &Window, first: u64, cp_rank: u64) -> Vec<u64> {
        let below = |row| self.rows_below(row, cp_rank);
        let (asked, _) = self.rows_of(window.first, window.count);
        let (begin, end) = self.rows_of(first, window.first + window.count - first);
        if below(begin) == below(end) {
            return Vec::new();
        }
        let gone = below(begin) / self.rows - below(asked) / self.rows;
        window.items.iter().skip(gone as usize).copied().collect()
    }
}

fn common(a: u64, b: u64) -> u64 {
    if b == 0 {
        a
    } else {
        common(b, a % b)
    }
}
