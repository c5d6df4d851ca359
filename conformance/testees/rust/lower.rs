//! Which bytes go where, for a rank pair and one request: lowering.md.

use crate::codec::{uint_from_json, Json, Map, Result};
use crate::description::*;
use crate::list;
use crate::plan::{plan, Features};
use std::collections::BTreeMap;

/// One rank: what it owns, where that lies, and its grants by group.
pub struct Side {
    geometry: Geometry,
    rank: u64,
    columns: BTreeMap<u64, Columns>,
    windows: BTreeMap<u64, Window>,
}

/// One entry for each layer, then part.
struct Columns {
    region: Vec<u64>,
    offset: Vec<u64>,
    item: Vec<u64>,
    row: Vec<u64>,
    lane: Vec<u64>,
}

pub struct Window {
    pub first: u64,
    pub count: u64,
    pub items: Vec<u64>,
}

impl Window {
    pub fn of(map: &Map) -> Window {
        Window { first: number(map, "first"), count: number(map, "count"), items: numbers(map, "items") }
    }
}

impl Side {
    /// Nothing where it is not a SIDE of testee.md.
    pub fn read(json: &Json) -> Option<Result<Side>> {
        let (columns, windows) = (list(json.get("columns")?)?, list(json.get("windows")?)?);
        let rank = uint_from_json(json.get("rank")?).ok()?;
        let geometry = json.get("geometry")?;
        Some(Side::of(geometry, rank, columns, windows))
    }

    fn of(geometry: &Json, rank: u64, columns: &[Json], windows: &[Json]) -> Result<Side> {
        let mut side =
            Side { geometry: Geometry::read(geometry)?, rank, columns: BTreeMap::new(), windows: BTreeMap::new() };
        for (i, json) in columns.iter().enumerate() {
            let (layout, record) = read("Columns", json).map_err(|it| it.index(i).under("columns"))?;
            let map = Map { layout, record: &record };
            let all = |field| numbers(&map, field);
            let (item, row, lane) = (all("item_stride"), all("row_stride"), all("lane_stride"));
            let columns = Columns { region: all("region"), offset: all("offset"), item, row, lane };
            side.columns.insert(number(&map, "group"), columns);
        }
        for (i, json) in windows.iter().enumerate() {
            let (layout, record) = read("Grants", json).map_err(|it| it.index(i).under("windows"))?;
            let map = Map { layout, record: &record };
            side.windows.insert(number(&map, "group"), Window::of(&map));
        }
        Ok(side)
    }

    fn shares(&self) -> &[Share] {
        self.geometry.rank(self.rank).map_or(&[], |rank| &rank.owns)
    }

    /// What the rank holds of a layer of a part, where it states a window for it.
    fn place(&self, model: u64, part: &str, layer: u64) -> Option<Place<'_>> {
        self.shares().iter().find_map(|share| {
            let group = self.geometry.group(share.group).filter(|group| group.model == model)?;
            let first = group.parts.iter().position(|it| it.name == part)?;
            self.windows.get(&group.id).and(self.columns.get(&group.id))?;
            let nth = share.layers.binary_search(&layer).ok()?;
            Some(Place { side: self, group, share, first, nth })
        })
    }
}

/// A layer of a part on a rank.
struct Place<'a> {
    side: &'a Side,
    group: &'a Group,
    share: &'a Share,
    first: usize,
    nth: usize,
}

/// Where bytes lie in item 0 and row 0: column, offset, and how many there are until a section or a lane ends.
struct Spot {
    column: usize,
    offset: u64,
    bytes: u64,
}

impl Place<'_> {
    fn columns(&self) -> &Columns {
        &self.side.columns[&self.share.group]
    }

    fn window(&self) -> &Window {
        &self.side.windows[&self.share.group]
    }

    fn spot(&self, byte: u64) -> Spot {
        let whole = self.group.parts[self.first].whole;
        let (lane, byte) = (byte / whole, byte % whole);
        let (p, part) = (self.group.parts.iter().enumerate())
            .find(|(_, it)| it.first == self.first && it.at <= byte && byte < it.at + it.lane_bytes)
            .expect("sections tile the lane");
        let mut nth = 0;
        for &(_, lo, hi) in self.share.lanes.iter().filter(|it| it.0 == p) {
            if lo <= lane && lane < hi {
                nth += lane - lo;
                break;
            }
            nth += hi - lo;
        }
        let (column, columns) = (self.nth * self.group.parts.len() + p, self.columns());
        // The stride of an axis of one element may be anything.
        let offset = columns.offset[column] + if nth > 0 { nth * columns.lane[column] } else { 0 };
        Spot { column, offset: offset + byte - part.at, bytes: part.at + part.lane_bytes - byte }
    }

    /// Index in the grant's items and row in the item of a global row; nothing where the window does not reach it.
    fn item(&self, row: u64) -> Option<(u64, u64)> {
        let (group, window) = (self.group, self.window());
        let (index, row) = match group.kind {
            PAGE => {
                let (owner, local) = group.owner(row * group.step)?;
                let before = group.rows_below(group.rows_of(window.first, window.count).0, self.share.cp_rank);
                let index = (local / group.rows).checked_sub(before / group.rows)?;
                if owner != self.share.cp_rank {
                    return None;
                }
                (index, local % group.rows)
            }
            _ => (0, row % group.rows),
        };
        Some((*window.items.get(index as usize)?, row))
    }

    /// Offset of an item and row in a column.
    fn offset(&self, column: usize, (item, row): (u64, u64)) -> u64 {
        let columns = self.columns();
        let step = |n: u64, stride: u64| if n > 0 { n * stride } else { 0 };
        step(item, columns.item[column]) + step(row, columns.row[column])
    }

    /// Global rows that the window covers, as far as a ring still has them.
    fn rows(&self) -> (u64, u64) {
        let (group, window) = (self.group, self.window());
        let (begin, end) = group.rows_of(window.first, window.count);
        match group.kind {
            RING => (begin.max(end.saturating_sub(group.rows)), end),
            _ => (begin, end),
        }
    }
}

/// Bytes that are copied, contiguous on both sides, with their coordinates.
struct Copy {
    /// Model, layer, part, map, row and byte.
    at: [u64; 6],
    group: u64,
    source: (u64, u64),
    sink: (u64, u64),
    bytes: u64,
}

/// All that a rank pair moves for a request.
pub struct Moved(Vec<Copy>);

impl Moved {
    pub fn between(source: &Side, sink: &Side) -> Result<Moved> {
        let plan = plan(&source.geometry, &sink.geometry, Features::default())?;
        let (mut copies, mut maps) = (Vec::new(), Vec::new());
        let routes = plan.routes.range((source.rank, sink.rank, 0)..=(source.rank, sink.rank, u64::MAX));
        for &[_, _, group, model, begin, end, part, lo, hi, c, d, _] in routes.flat_map(|route| route.1) {
            let home = sink.geometry.group(group).expect("a group of the sink");
            for layer in begin..end {
                let name = &home.parts[part as usize].name;
                let (from, to) = match (source.place(model, name, layer), sink.place(model, name, layer)) {
                    (Some(from), Some(to)) if home.kind != HANDOFF => (from, to),
                    _ => continue,
                };
                let map = (from.group.id, group, c, d);
                let known = maps.iter().position(|it| *it == map).unwrap_or(maps.len());
                if known == maps.len() {
                    maps.push(map);
                }
                let at = [model, layer, part, known as u64];
                between(&from, &to, at, (lo, hi), &mut copies);
            }
        }
        Ok(Moved(copies))
    }

    /// Runs by place at the sink.
    pub fn copies(&self) -> Vec<[u64; 5]> {
        let mut copies: Vec<&Copy> = self.0.iter().collect();
        copies.sort_by_key(|copy| copy.sink);
        joined(&copies)
    }

    /// Runs in the order of the packed stream.
    pub fn stream(&self) -> Vec<[u64; 5]> {
        let mut copies: Vec<&Copy> = self.0.iter().collect();
        copies.sort_by_key(|copy| copy.at);
        joined(&copies)
    }

    /// By group of the sink, where byte o of region r at the source is 7 o + r.
    pub fn checksums(&self) -> BTreeMap<u64, u64> {
        let mut sums = BTreeMap::new();
        for copy in &self.0 {
            let [model, layer, part, _, row, byte] = copy.at;
            let coordinate = (model << 48).wrapping_add(layer << 16).wrapping_add(part);
            let weight = mix(row.wrapping_add(mix(coordinate)));
            let (region, offset) = copy.source;
            let sum = sums.entry(copy.group).or_insert(0u64);
            for x in 0..copy.bytes {
                let value = (offset + x).wrapping_mul(7).wrapping_add(region) % 256;
                *sum = sum.wrapping_add(value.wrapping_mul(weight).wrapping_mul(mix(byte + x)));
            }
        }
        sums
    }
}

/// The bytes [lo, hi) of a layer, of all rows that belong to the box.
fn between(from: &Place, to: &Place, at: [u64; 4], (lo, hi): (u64, u64), copies: &mut Vec<Copy>) {
    let mut spots = Vec::new();
    let mut byte = lo;
    while byte < hi {
        let (source, sink) = (from.spot(byte), to.spot(byte));
        let bytes = source.bytes.min(sink.bytes).min(hi - byte);
        spots.push((byte, source, sink, bytes));
        byte += bytes;
    }
    for row in rows(from, to) {
        let (out, into) = match (from.item(row), to.item(row)) {
            (Some(out), Some(into)) => (out, into),
            _ => continue,
        };
        for (byte, source, sink, bytes) in &spots {
            let place = |place: &Place, spot: &Spot, item| {
                (place.columns().region[spot.column], spot.offset + place.offset(spot.column, item))
            };
            copies.push(Copy {
                at: [at[0], at[1], at[2], at[3], row, *byte],
                group: to.group.id,
                source: place(from, source, out),
                sink: place(to, sink, into),
                bytes: *bytes,
            });
        }
    }
}

/// Global rows that move from one rank to the other; those of slots, and of rings that move whole, from 0.
fn rows(from: &Place, to: &Place) -> Box<dyn Iterator<Item = u64>> {
    let group = to.group;
    let (a, b) = (from.rows(), to.rows());
    match (group.kind, group.opaque()) {
        (SLOT, true) | (RING, true) => Box::new(0..group.rows),
        (SLOT, false) => Box::new(0..group.live_rows),
        (_, true) => {
            let cp_rank = to.share.cp_rank;
            let below = |row| group.rows_below(row, cp_rank);
            let (begin, end) = (below(b.0), below(b.1));
            let items = if begin < end { begin / group.rows..ceil(end, group.rows) } else { 0..0 };
            let globals: Vec<u64> =
                (items.start * group.rows..items.end * group.rows).map(|local| group.global(local, cp_rank)).collect();
            Box::new(globals.into_iter())
        }
        _ => Box::new(a.0.max(b.0)..a.1.min(b.1)),
    }
}

/// Runs of copies that follow each other on both sides.
fn joined(copies: &[&Copy]) -> Vec<[u64; 5]> {
    let mut runs: Vec<[u64; 5]> = Vec::new();
    for copy in copies {
        let ((region, offset), (into, place)) = (copy.source, copy.sink);
        match runs.last_mut() {
            Some(run) if [run[0], run[1] + run[4], run[2], run[3] + run[4]] == [region, offset, into, place] => {
                run[4] += copy.bytes;
            }
            _ => runs.push([region, offset, into, place, copy.bytes]),
        }
    }
    runs
}

/// splitmix64, the lowest bit set.
fn mix(x: u64) -> u64 {
    let z = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    (z ^ z >> 31) | 1
}
