//! Which bytes go where, for a rank pair and one request (lowering.md), and their checksums (verify.md).
//!
//! A copy program is a table of operations, one for each layer, part and contiguous piece of its lanes, over maps of
//! rows, one for each pair of groups. It has no entry for a page and a layer until its runs are asked for.

use crate::description::{ceil, Group, Share};
use crate::enums::{ErrorCode, ItemKind};
use crate::error::{Error, Result};
use crate::messages::{Columns, Grants};
use crate::plan::{Plan, Route};
use crate::pool::RankLayout;
use alloc::collections::BTreeMap;
use alloc::format;
use alloc::vec;
use alloc::vec::Vec;

/// One of the two sides of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The side that is read.
    Source,
    /// The side that is written.
    Sink,
}

/// Bytes that are contiguous on both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Region and offset at the source.
    pub source: (u32, u64),
    /// Region and offset at the sink.
    pub sink: (u32, u64),
    /// Number of bytes.
    pub bytes: u64,
}

/// All that a rank pair copies for a request; hand-off data travels in messages, and is not in it.
#[derive(Clone, Debug)]
pub struct CopyProgram {
    /// By model, layer, part, map and byte.
    ops: Vec<Op>,
    maps: Vec<Vec<Rows>>,
}

/// Bytes of one layer of a part, of every row of a map.
#[derive(Clone, Debug)]
struct Op {
    model: u64,
    layer: u64,
    part: u64,
    map: usize,
    /// The sink's group.
    group: u64,
    /// First byte on the lane axis, and how many.
    byte: u64,
    bytes: u64,
    source: Spot,
    sink: Spot,
}

/// Where bytes of item 0 and row 0 lie.
#[derive(Clone, Copy, Debug)]
struct Spot {
    region: u32,
    offset: u64,
    item: u64,
    row: u64,
}

/// Rows that follow each other in an item of both sides: the first one's global number, and item and row of each side.
#[derive(Clone, Copy, Debug)]
struct Rows {
    first: u64,
    count: u64,
    source: (u64, u64),
    sink: (u64, u64),
}

impl Spot {
    fn at(&self, (item, row): (u64, u64)) -> u64 {
        let step = |n: u64, stride: u64| if n > 0 { n * stride } else { 0 };
        self.offset + step(item, self.item) + step(row, self.row)
    }
}

impl Op {
    fn coordinate(&self) -> (u64, u64, u64, usize) {
        (self.model, self.layer, self.part, self.map)
    }

    /// Whether rows of an item follow each other without a gap on both sides.
    fn flat(&self) -> bool {
        self.source.row == self.bytes && self.sink.row == self.bytes
    }

    /// The copies of rows: one if they are contiguous, or one for each.
    fn runs<'a>(&'a self, rows: &'a Rows) -> impl Iterator<Item = Run> + 'a {
        let each = if self.flat() { rows.count } else { 1 };
        (0..rows.count / each).map(move |i| self.run(rows, i, each))
    }

    /// The copy of some rows, from the i-th on.
    fn run(&self, rows: &Rows, i: u64, count: u64) -> Run {
        let place = |spot: &Spot, (item, row)| (spot.region, spot.at((item, row + i)));
        let (source, sink) = (place(&self.source, rows.source), place(&self.sink, rows.sink));
        Run { source, sink, bytes: self.bytes * count }
    }
}

impl CopyProgram {
    /// What the plan's routes of a rank pair copy, of the windows that both sides state for a request.
    ///
    /// # Errors
    ///
    /// `BAD_GRANT` or `OUT_OF_REGION` if a routed group has no window, or one whose items are not those that it needs;
    /// the path tells the sink's `grants[i]`, or the source's `source[i]`. Overlaps of items are not looked for.
    pub fn new(
        plan: &Plan,
        source: (&RankLayout<'_>, &[Grants]),
        sink: (&RankLayout<'_>, &[Grants]),
    ) -> Result<CopyProgram> {
        let source = Windows::new(source.0, source.1, "source")?;
        let sink = Windows::new(sink.0, sink.1, "grants")?;
        let mut program = CopyProgram { ops: Vec::new(), maps: Vec::new() };
        let mut known = Vec::new();
        for route in plan.between(source.layout.rank as u32, sink.layout.rank as u32) {
            program.add(route, &source, &sink, &mut known)?;
        }
        program.ops.sort_by_key(|op| (op.coordinate(), op.byte));
        Ok(program)
    }

    fn add(
        &mut self,
        route: &Route,
        source: &Windows<'_>,
        sink: &Windows<'_>,
        known: &mut Vec<(u64, u64, u64, u64)>,
    ) -> Result<()> {
        let to = match sink.home(route.group.into())? {
            Some(to) => to,
            None => return Ok(()),
        };
        for &[_, _, group, model, begin, end, part, lo, hi, c, d, _] in &route.rows {
            let name = &to.group.parts[part as usize].name;
            for layer in begin..end {
                let from = source.holding(model, name, layer)?;
                let map = (from.group.id, group, c, d);
                let number = known.iter().position(|it| *it == map).unwrap_or(known.len());
                if number == known.len() {
                    known.push(map);
                    self.maps.push(rows_of(&from, &to)?);
                }
                let op = (model, layer, part, number);
                self.add_pieces(op, (lo, hi), &Stored::new(&from, name, layer)?, &Stored::new(&to, name, layer)?);
            }
        }
        Ok(())
    }

    /// The bytes [lo, hi) of a layer, cut where they are contiguous on both sides no longer.
    fn add_pieces(
        &mut self,
        (model, layer, part, map): (u64, u64, u64, usize),
        (lo, hi): (u64, u64),
        from: &Stored<'_>,
        to: &Stored<'_>,
    ) {
        let mut byte = lo;
        let first = self.ops.len();
        while byte < hi {
            let ((source, ours), (sink, theirs)) = (from.spot(byte), to.spot(byte));
            let bytes = ours.min(theirs).min(hi - byte);
            let follows = |last: &Spot, length: u64, next: &Spot| {
                (last.region, last.offset + length, last.item, last.row)
                    == (next.region, next.offset, next.item, next.row)
            };
            match self.ops[first..].last_mut() {
                Some(op) if follows(&op.source, op.bytes, &source) && follows(&op.sink, op.bytes, &sink) => {
                    op.bytes += bytes;
                }
                _ => self.ops.push(Op { model, layer, part, map, group: to.home.group.id, byte, bytes, source, sink }),
            }
            byte += bytes;
        }
    }

    /// Number of bytes that it copies.
    pub fn bytes(&self) -> u64 {
        let rows: Vec<u64> = self.maps.iter().map(|map| map.iter().map(|rows| rows.count).sum()).collect();
        self.ops.iter().map(|op| op.bytes.saturating_mul(rows[op.map])).fold(0, u64::saturating_add)
    }

    /// The copies, each as long as it is contiguous on both sides, by ascending place at the sink.
    pub fn runs(&self) -> Vec<Run> {
        let ops = self.ops.iter();
        let mut runs: Vec<Run> =
            ops.flat_map(|op| self.maps[op.map].iter().flat_map(move |rows| op.runs(rows))).collect();
        runs.sort_unstable_by_key(|run| run.sink);
        joined(runs.into_iter())
    }

    /// The copies in the order of the packed stream, in which they follow each other (packed.md).
    pub fn stream(&self) -> Vec<Run> {
        let mut runs = Vec::new();
        let mut rest = &self.ops[..];
        while let Some(op) = rest.first() {
            let many = rest.iter().take_while(|it| it.coordinate() == op.coordinate()).count();
            let (alike, after) = rest.split_at(many);
            rest = after;
            for rows in &self.maps[op.map] {
                if many == 1 {
                    runs.extend(op.runs(rows));
                } else {
                    runs.extend((0..rows.count).flat_map(|i| alike.iter().map(move |op| op.run(rows, i, 1))));
                }
            }
        }
        joined(runs.into_iter())
    }

    /// The checksum of each of the sink's groups that moves a row, of the memory of one side, by region.
    ///
    /// # Errors
    ///
    /// `OUT_OF_REGION` if a region is not there or too short.
    pub fn checksums<'m>(&self, side: Side, memory: impl Fn(u32) -> Option<&'m [u8]>) -> Result<BTreeMap<u32, u64>> {
        let mut sums = BTreeMap::new();
        let mut weights: (u64, Vec<u64>) = (0, Vec::new());
        for op in &self.ops {
            let seed = mix((op.model << 48).wrapping_add(op.layer << 16).wrapping_add(op.part));
            for rows in &self.maps[op.map] {
                for i in 0..rows.count {
                    let run = op.run(rows, i, 1);
                    let place = if side == Side::Source { run.source } else { run.sink };
                    let bytes = slice(memory(place.0), place, op.bytes)?;
                    if weights.0 != op.byte || weights.1.len() != bytes.len() {
                        weights = (op.byte, (op.byte..op.byte + op.bytes).map(mix).collect());
                    }
                    let products =
                        bytes.iter().zip(&weights.1).map(|(byte, weight)| u64::from(*byte).wrapping_mul(*weight));
                    let all = products.fold(0u64, u64::wrapping_add);
                    let sum = sums.entry(op.group as u32).or_insert(0u64);
                    *sum = sum.wrapping_add(all.wrapping_mul(mix((rows.first + i).wrapping_add(seed))));
                }
            }
        }
        Ok(sums)
    }
}

fn slice(region: Option<&[u8]>, place: (u32, u64), bytes: u64) -> Result<&[u8]> {
    let end = place.1.saturating_add(bytes);
    let found = match (usize::try_from(place.1), usize::try_from(end)) {
        (Ok(begin), Ok(end)) => region.and_then(|region| region.get(begin..end)),
        _ => None,
    };
    found.ok_or_else(|| {
        let wrong = Error::at(ErrorCode::OUT_OF_REGION, &format!("regions[{}]", place.0));
        wrong.between(format!("{} bytes", end), region.map_or(0, <[u8]>::len))
    })
}

/// A rank with its windows by group.
struct Windows<'a> {
    layout: &'a RankLayout<'a>,
    by_group: BTreeMap<u64, &'a Grants>,
    name: &'a str,
}

/// A group of a rank: what the rank owns of it, where that lies, and its window.
struct Home<'a> {
    group: &'a Group,
    share: &'a Share,
    columns: &'a Columns,
    window: &'a Grants,
    /// Local number of the first item of the window.
    first: u64,
}

impl<'a> Windows<'a> {
    fn new(layout: &'a RankLayout<'a>, grants: &'a [Grants], name: &'a str) -> Result<Windows<'a>> {
        let mut by_group = BTreeMap::new();
        for (i, grant) in grants.iter().enumerate() {
            let at = |error: Error| error.under(&format!("{}[{}]", name, i));
            let (group, share) = layout.owned(grant).map_err(at)?;
            layout.check_items(group, share, grant).map_err(at)?;
            group.check_begin(grant.first, grant.count, share.cp_rank).map_err(at)?;
            by_group.insert(group.id, grant);
        }
        Ok(Windows { layout, by_group, name })
    }

    /// The group of an id with its window; none if it is hand-off data.
    fn home(&self, id: u64) -> Result<Option<Home<'a>>> {
        let lacks = || Error::at(ErrorCode::BAD_GRANT, self.name).between(format!("a window of group {}", id), "none");
        let layout = self.layout;
        let group = layout.description.group_of(id).ok_or_else(lacks)?;
        if group.kind == ItemKind::Handoff {
            return Ok(None);
        }
        let share = layout.share(id).ok_or_else(lacks)?;
        let (columns, window) = (layout.columns.get(&id).ok_or_else(lacks)?, self.by_group.get(&id).ok_or_else(lacks)?);
        let begin = group.rows_of(window.first, window.count).0;
        let first = group.rows_below(begin, share.cp_rank) / group.rows;
        Ok(Some(Home { group, share, columns, window, first }))
    }

    /// The group in which the rank holds a layer of a part.
    fn holding(&self, model: u64, part: &str, layer: u64) -> Result<Home<'a>> {
        let shares = self.layout.description.shares(self.layout.rank).iter();
        let mut groups = shares.filter_map(|share| Some((share, self.layout.description.group_of(share.group)?)));
        let holds = |share: &Share, group: &Group| {
            let alike = group.model == model && group.kind != ItemKind::Handoff;
            alike && group.parts.iter().any(|it| it.name == part) && share.layers.binary_search(&layer).is_ok()
        };
        let found = groups.find(|(share, group)| holds(share, group)).map(|(_, group)| group.id);
        let home = found.map_or(Ok(None), |id| self.home(id))?;
        home.ok_or_else(|| Error::at(ErrorCode::BAD_GRANT, self.name).between("a plan of this rank", "another"))
    }
}

/// First lane, lane after the last, and the number of the first in the rank's own order.
type Lanes = (u64, u64, u64);

/// A layer of a part on a rank.
struct Stored<'a> {
    home: &'a Home<'a>,
    /// Column of the layer's first part.
    column: usize,
    /// Index, and lanes of the rank, of each section of the part.
    sections: Vec<(usize, Vec<Lanes>)>,
    whole: u64,
}

impl<'a> Stored<'a> {
    fn new(home: &'a Home<'a>, name: &str, layer: u64) -> Result<Stored<'a>> {
        let lacks = || Error::at(ErrorCode::BAD_GRANT, "").between(format!("layer {} of {}", layer, name), "none");
        let nth = home.share.layers.binary_search(&layer).map_err(|_| lacks())?;
        let parts = || home.group.parts.iter().enumerate().filter(|it| it.1.name == name);
        let whole = parts().next().ok_or_else(lacks)?.1.whole;
        let lanes = |p: usize| {
            let mut before = 0;
            let own = home.share.lanes.iter().filter(move |it| it.0 == p).map(|&(_, lo, hi)| {
                before += hi - lo;
                (lo, hi, before - (hi - lo))
            });
            own.collect::<Vec<_>>()
        };
        let sections = parts().map(|(p, _)| (p, lanes(p))).collect();
        Ok(Stored { home, column: nth * home.group.parts.len(), sections, whole })
    }

    /// Where a byte of the lane axis lies, and how many follow it until a section or a lane ends.
    fn spot(&self, byte: u64) -> (Spot, u64) {
        let (lane, byte) = (byte / self.whole, byte % self.whole);
        let parts = &self.home.group.parts;
        let within = |it: &&(usize, Vec<Lanes>)| {
            let part = &parts[it.0];
            part.at <= byte && byte < part.at + part.lane_bytes
        };
        // Sections tile a lane, and a route has no lane that the rank does not own.
        let (p, lanes) = self.sections.iter().find(within).unwrap_or(&self.sections[0]);
        let own = lanes.iter().find(|it| it.0 <= lane && lane < it.1);
        let nth = own.map_or(0, |it| it.2 + lane - it.0);
        let (column, columns, part) = (self.column + p, self.home.columns, &parts[*p]);
        // The stride of an axis of one element may be anything.
        let offset = columns.offset[column] + if nth > 0 { nth * columns.lane_stride[column] } else { 0 };
        let spot = Spot {
            region: columns.region[column],
            offset: offset + (byte - part.at),
            item: columns.item_stride[column],
            row: columns.row_stride[column],
        };
        (spot, part.at + part.lane_bytes - byte)
    }
}

impl Home<'_> {
    /// Item and row in it of a global row, and how many rows follow it there; nothing if the window does not reach it.
    fn locate(&self, row: u64) -> (Option<(u64, u64)>, u64) {
        let group = self.group;
        let within = |local: u64| group.rows - local % group.rows;
        if group.kind != ItemKind::Page {
            return (self.item(0).map(|item| (item, row % group.rows)), within(row));
        }
        let token = row.saturating_mul(group.step);
        let run = (group.rest_of_run(token) / group.step).max(1);
        match group.owner_of(token) {
            Some((owner, local)) if owner == self.share.cp_rank => {
                let item = (local / group.rows).checked_sub(self.first).and_then(|index| self.item(index));
                (item.map(|item| (item, local % group.rows)), run.min(within(local)))
            }
            _ => (None, run),
        }
    }

    fn item(&self, index: u64) -> Option<u64> {
        let items = self.window.items.as_deref().unwrap_or(&[]);
        items.get(usize::try_from(index).ok()?).map(|item| (*item).into())
    }

    /// Global rows that the window covers, as far as a ring still has them.
    fn rows(&self) -> (u64, u64) {
        let (begin, end) = self.group.rows_of(self.window.first, self.window.count);
        match self.group.kind {
            ItemKind::Ring => (begin.max(end.saturating_sub(self.group.rows)), end),
            _ => (begin, end),
        }
    }
}

/// Rows that move from one rank to the other, by ascending global row; those of slots, and of rings that move whole,
/// from 0.
fn rows_of(from: &Home<'_>, to: &Home<'_>) -> Result<Vec<Rows>> {
    let group = to.group;
    let (a, b) = (from.rows(), to.rows());
    let ranges = match (group.kind, group.opaque()) {
        (ItemKind::Slot | ItemKind::Ring, true) => vec![(0, group.rows)],
        (ItemKind::Slot, false) => vec![(0, group.live_rows)],
        (_, true) => whole_items(to, b)?,
        _ => vec![(a.0.max(b.0), a.1.min(b.1))],
    };
    let mut rows = Vec::new();
    for (mut row, end) in ranges {
        while row < end {
            let ((source, ours), (sink, theirs)) = (from.locate(row), to.locate(row));
            let count = ours.min(theirs).min(end - row);
            if let (Some(source), Some(sink)) = (source, sink) {
                rows.push(Rows { first: row, count, source, sink });
            }
            row += count;
        }
    }
    Ok(rows)
}

/// Ranges of global rows of all items that hold a row of the window.
fn whole_items(to: &Home<'_>, (begin, end): (u64, u64)) -> Result<Vec<(u64, u64)>> {
    let (group, cp_rank) = (to.group, to.share.cp_rank);
    let (begin, end) = (group.rows_below(begin, cp_rank), group.rows_below(end, cp_rank));
    let mut ranges = Vec::new();
    if begin == end {
        return Ok(ranges);
    }
    let beyond = || Error::at(ErrorCode::BAD_GRANT, "grants").between("tokens below 2^64", "more");
    let last = ceil(end, group.rows).checked_mul(group.rows).ok_or_else(beyond)?;
    let mut local = begin / group.rows * group.rows;
    while local < last {
        let row = group.global(local, cp_rank).ok_or_else(beyond)?;
        let run = (group.rest_of_run(row.checked_mul(group.step).ok_or_else(beyond)?) / group.step).max(1);
        let count = run.min(last - local);
        ranges.push((row, row.checked_add(count).ok_or_else(beyond)?));
        local += count;
    }
    Ok(ranges)
}

/// Runs of copies that follow each other on both sides.
fn joined(copies: impl Iterator<Item = Run>) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for copy in copies {
        match runs.last_mut() {
            Some(run) if follows(run.source, run.bytes, copy.source) && follows(run.sink, run.bytes, copy.sink) => {
                run.bytes += copy.bytes;
            }
            _ => runs.push(copy),
        }
    }
    runs
}

fn follows(last: (u32, u64), bytes: u64, next: (u32, u64)) -> bool {
    last.0 == next.0 && last.1 + bytes == next.1
}

/// splitmix64, the lowest bit set.
fn mix(x: u64) -> u64 {
    let z = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    (z ^ z >> 31) | 1
}
