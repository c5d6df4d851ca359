//! Who sends what to whom: planning.md.

use crate::codec::{refuse_at, Result};
use crate::description::*;
use crate::elect::{elect, Piece};
use crate::sha256::sha256;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

/// Source rank, sink rank, sink group, model, first layer, layer after the last, part, first byte, byte after the last,
/// source cp rank, sink cp rank, ordinal.
pub type Row = [u64; 12];

pub struct Plan {
    /// By source rank, sink rank and sink group.
    pub routes: BTreeMap<(u64, u64, u64), Vec<Row>>,
    pub cold: Vec<u64>,
}

pub fn digest<'a>(rows: impl Iterator<Item = &'a Row>) -> [u8; 32] {
    sha256(&rows.flatten().flat_map(|number| number.to_le_bytes()).collect::<Vec<u8>>())
}

#[derive(Clone, Copy, Default)]
pub struct Features {
    pub spread_one: bool,
    pub few_sources: bool,
    pub cold_draft: bool,
}

/// What one rank holds of a part: bytes of the lane axis, in its own order.
struct Held {
    rank: u64,
    cp_rank: u64,
    spans: Vec<(u64, u64)>,
}

/// Who holds a part: of each layer the group, and places in `held`, by ascending rank.
#[derive(Default)]
struct Holders {
    held: Vec<Held>,
    layers: BTreeMap<u64, (u64, Vec<usize>)>,
}

/// By model and the name of the part.
type Owners<'a> = BTreeMap<(u64, &'a str), Holders>;

fn owners(geometry: &Geometry) -> Owners<'_> {
    let mut owners = Owners::new();
    for rank in &geometry.ranks {
        for share in &rank.owns {
            let group = geometry.group(share.group).expect("a group that is stated");
            for (p, part) in group.parts.iter().enumerate().filter(|(p, part)| part.first == *p) {
                let holders = owners.entry((group.model, &part.name[..])).or_default();
                for layer in &share.layers {
                    holders.layers.entry(*layer).or_insert((group.id, Vec::new())).1.push(holders.held.len());
                }
                holders.held.push(Held { rank: rank.rank, cp_rank: share.cp_rank, spans: spans(group, p, share) });
            }
        }
    }
    owners
}

/// Bytes of a part that a share holds, of all of its sections.
fn spans(group: &Group, first: usize, share: &Share) -> Vec<(u64, u64)> {
    let mut spans = Vec::new();
    for &(p, lo, hi) in &share.lanes {
        let part = &group.parts[p];
        if part.first != first {
            continue;
        }
        if part.lane_bytes == part.whole {
            spans.push((lo * part.whole, hi * part.whole));
        } else {
            spans.extend((lo..hi).map(|lane| lane * part.whole + part.at).map(|at| (at, at + part.lane_bytes)));
        }
    }
    spans
}

pub fn plan(source: &Geometry, sink: &Geometry, features: Features) -> Result<Plan> {
    facts(source, sink)?;
    let (theirs, ours) = (owners(source), owners(sink));
    let lacks = |model: u64| !theirs.keys().any(|key| key.0 == model);
    let cold: BTreeSet<u64> = match features.cold_draft {
        true => ours.keys().map(|key| key.0).filter(|model| *model > 0 && lacks(*model)).collect(),
        false => BTreeSet::new(),
    };
    let mut pairing = Pairing { source, pieces: Vec::new(), counted: 0, shares: 0, classes: BTreeMap::new() };
    let asked = || sink.groups.iter().filter(|group| !cold.contains(&group.model));
    for group in asked() {
        for (p, part) in group.parts.iter().enumerate().filter(|(p, part)| part.first == *p) {
            if let Some(holders) = ours.get(&(group.model, &part.name[..])) {
                pairing.part(group, p, holders, theirs.get(&(group.model, &part.name[..])))?;
            }
        }
    }
    for group in asked() {
        for part in &group.parts {
            if leaves_some(source, sink, group, part, &ours, &theirs) {
                return refuse_at("PART_MISSING", &at(group, part, ""));
            }
        }
    }
    let routes = elect(pairing.pieces, sink.replica, features);
    Ok(Plan { routes, cold: cold.into_iter().collect() })
}

fn facts(source: &Geometry, sink: &Geometry) -> Result<()> {
    let of = |geometry: &Geometry| -> BTreeMap<String, (String, u64)> {
        geometry.facts.iter().map(|fact| (fact.name.clone(), (fact.value.clone(), fact.rule))).collect()
    };
    let (source, sink) = (of(source), of(sink));
    let names: BTreeSet<&String> = source.keys().chain(sink.keys()).collect();
    for name in names {
        let (a, b) = (source.get(name), sink.get(name));
        let strictest = a.iter().chain(b.iter()).map(|fact| fact.1).min();
        if strictest == Some(EQUAL) && a.map(|fact| &fact.0) != b.map(|fact| &fact.0) {
            return refuse_at("IDENTITY_MISMATCH", &format!("facts[{}]", name));
        }
    }
    Ok(())
}

const EQUAL: u64 = 1;

/// Whether the sink takes this part of a layer and leaves another that the source has.
fn leaves_some(source: &Geometry, sink: &Geometry, group: &Group, part: &Part, ours: &Owners, theirs: &Owners) -> bool {
    let holders = match ours.get(&(group.model, &part.name[..])) {
        Some(holders) if group.kind != HANDOFF && !is_optional(&part.name) => holders,
        _ => return false,
    };
    let in_memory = |id: u64| source.group(id).map_or(false, |it| it.kind != HANDOFF);
    let layers = || holders.layers.iter().filter(|layer| layer.1 .0 == group.id).map(|layer| layer.0);
    let needed = |name: &str| !is_optional(name) && !sink.without.iter().any(|it| it == name);
    theirs.iter().filter(|(key, _)| key.0 == group.model && needed(key.1)).any(|(key, other)| {
        layers().any(|layer| {
            let there = other.layers.get(layer).map_or(false, |held| in_memory(held.0));
            there && !ours.get(key).map_or(false, |it| it.layers.contains_key(layer))
        })
    })
}

fn at(group: &Group, part: &Part, field: &str) -> String {
    format!("groups[{}].parts[{}]{}", group.name, part.name, field)
}

/// The parts of both sides, paired, compared and cut; and how much that comes to.
struct Pairing<'a> {
    source: &'a Geometry,
    pieces: Vec<Piece>,
    counted: u64,
    shares: u64,
    /// Pairs of cp ranks that share a row, by group of the source and of the sink.
    classes: BTreeMap<(u64, u64), Rc<Vec<(u64, u64)>>>,
}

impl Pairing<'_> {
    fn part(&mut self, group: &Group, p: usize, ours: &Holders, theirs: Option<&Holders>) -> Result<()> {
        let part = &group.parts[p];
        let layers = || ours.layers.iter().filter(|layer| layer.1 .0 == group.id);
        let mut sets: BTreeMap<(u64, &[usize], &[usize]), Vec<u64>> = BTreeMap::new();
        for (layer, (_, needy)) in layers() {
            if let Some((from, sending)) = theirs.and_then(|it| it.layers.get(layer)) {
                sets.entry((*from, sending, needy)).or_default().push(*layer);
            }
        }
        for (layer, (_, needy)) in layers() {
            let theirs = match theirs {
                Some(theirs) => theirs,
                None => return refuse_at("PART_MISSING", &at(group, part, "")),
            };
            let (from, sending) = match theirs.layers.get(layer) {
                Some(held) => held,
                None => return refuse_at("LAYER_MISSING", &at(group, part, "")),
            };
            let home = self.source.group(*from).expect("owners have a group");
            let sent = home.parts.iter().find(|it| it.name == part.name).expect("owners have the part");
            compare(home, sent, group, part)?;
            let classes = self.classes(home, group, part)?;
            let held = |side: &'_ Holders, some: &[usize]| -> BTreeSet<Vec<(u64, u64)>> {
                some.iter().map(|one| side.held[*one].spans.clone()).collect()
            };
            let families = match part.encoding {
                None => vec![None],
                Some(_) if !held(ours, needy).is_subset(&held(theirs, sending)) => {
                    return refuse_at("LAYOUT_OPAQUE", &at(group, part, ""));
                }
                Some(_) => held(ours, needy).into_iter().map(Some).collect(),
            };
            let layers = match sets.remove(&(*from, &sending[..], &needy[..])) {
                Some(layers) => Rc::new(layers),
                None => continue,
            };
            for family in families {
                let of = |side: &'_ Holders, some: &[usize]| -> Vec<usize> {
                    let mine = |one: &&usize| family.as_ref().map_or(true, |family| *family == side.held[**one].spans);
                    some.iter().filter(mine).copied().collect()
                };
                let (sending, needy) = (of(theirs, sending), of(ours, needy));
                let sending: Vec<&Held> = sending.iter().map(|one| &theirs.held[*one]).collect();
                let needy: Vec<&Held> = needy.iter().map(|one| &ours.held[*one]).collect();
                self.cut(group, p, sent, &layers, &classes, &sending, &needy)?;
            }
        }
        Ok(())
    }

    /// Pairs of cp ranks of two groups that share a row at all.
    fn classes(&mut self, from: &Group, to: &Group, part: &Part) -> Result<Rc<Vec<(u64, u64)>>> {
        if let Some(known) = self.classes.get(&(from.id, to.id)) {
            return Ok(known.clone());
        }
        if from.cp_size * to.cp_size > MAX_CLASS_PAIRS {
            return refuse_at("ROW_MISMATCH", &format!("groups[{}].cp_size", to.name));
        }
        let runs = [from, to].into_iter().filter(|group| group.cp_size > 1).map(Group::places).sum::<u64>();
        self.counted += runs;
        if self.counted > MAX_PIECES {
            return refuse_at("TOO_LARGE", &at(to, part, ""));
        }
        let classes = Rc::new(meeting(from, to));
        self.classes.insert((from.id, to.id), classes.clone());
        Ok(classes)
    }

    /// Cuts a set of layers that the same ranks hold.
    #[allow(clippy::too_many_arguments)]
    fn cut(
        &mut self,
        group: &Group,
        p: usize,
        sent: &Part,
        layers: &Rc<Vec<u64>>,
        classes: &[(u64, u64)],
        sending: &[&Held],
        needy: &[&Held],
    ) -> Result<()> {
        let part = &group.parts[p];
        let refuse = |code| refuse_at(code, &at(group, part, ""));
        let spans = || sending.iter().chain(needy).flat_map(|held| &held.spans);
        let cuts: Vec<u64> = spans().flat_map(|span| [span.0, span.1]).collect::<BTreeSet<u64>>().into_iter().collect();
        let place = |byte: u64| cuts.binary_search(&byte).expect("a cut");
        let ends = BTreeSet::from([0, part.lanes * part.whole]);
        let all = ends.iter().filter(|end| cuts.binary_search(end).is_err()).count() + cuts.len();
        self.counted += spans().map(|span| (place(span.1) - place(span.0)) as u64).sum::<u64>();
        self.counted += all as u64 * classes.len() as u64;
        if self.counted > MAX_PIECES {
            return refuse("TOO_LARGE");
        }
        let mut of: BTreeMap<(bool, u64), Vec<Vec<u64>>> = BTreeMap::new();
        for (side, some) in [(true, sending), (false, needy)] {
            for held in some {
                let pieces = of.entry((side, held.cp_rank)).or_insert_with(|| vec![Vec::new(); cuts.len()]);
                for span in &held.spans {
                    pieces[place(span.0)..place(span.1)].iter_mut().for_each(|ranks| ranks.push(held.rank));
                }
            }
        }
        let runs = layers.windows(2).filter(|pair| pair[1] != pair[0] + 1).count() as u64 + 1;
        let (mut many, mut folded, mut fewer) = (0, 0, false);
        let cut = [sent, part].iter().any(|it| it.whole != it.lane_bytes);
        let lane = if cut { sent.whole.min(part.whole) } else { sent.whole.max(part.whole) };
        for &(c, d) in classes {
            let wanted = match of.get(&(false, d)) {
                Some(wanted) => wanted,
                None => continue,
            };
            for i in 0..cuts.len() {
                if wanted[i].is_empty() {
                    continue;
                }
                let held = match of.get(&(true, c)) {
                    Some(held) if !held[i].is_empty() => held,
                    _ => return refuse("COVERAGE"),
                };
                let (lo, hi, m) = (cuts[i], cuts[i + 1], wanted[i].len() as u64);
                many += m;
                folded += m * ((hi - 1) / lane - lo / lane + 1);
                fewer |= m < held[i].len() as u64;
                self.pieces.push(Piece {
                    group: group.id,
                    model: group.model,
                    part: p as u64,
                    layers: layers.clone(),
                    lo,
                    hi,
                    classes: (c, d),
                    candidates: Rc::new(held[i].clone()),
                    needy: Rc::new(wanted[i].clone()),
                });
            }
        }
        let each = layers.len() as u64;
        self.shares += match (sent.whole != part.whole, fewer) {
            (true, _) => folded * each,
            (false, true) => many * each,
            (false, false) => many * runs,
        };
        if self.shares > MAX_SHARES {
            return refuse("TOO_LARGE");
        }
        Ok(())
    }
}

/// A layer of a part, by the rows of the table of planning.md.
fn compare(home: &Group, sent: &Part, group: &Group, part: &Part) -> Result<()> {
    let streams = [PAGE, RING];
    let flows = streams.contains(&home.kind) && streams.contains(&group.kind) && !group.opaque();
    let deal = |it: &Group| match it.cp_size {
        1 => None,
        n if it.order.is_empty() => Some((n, it.interleave, it.origin, (0..n).collect::<Vec<u64>>())),
        n => Some((n, it.interleave, it.origin, it.order.clone())),
    };
    let (whole, other) = (part.whole, sent.whole);
    let unfit = part.encoding.is_some() && whole != other;
    let field = |name: &str| format!("groups[{}].{}", group.name, name);
    let rows = [
        (home.kind != group.kind && !flows, "KIND_MISMATCH", field("kind")),
        (home.axis != group.axis, "AXIS_MISMATCH", field("axis")),
        (sent.dtype != part.dtype, "DTYPE_MISMATCH", at(group, part, ".dtype")),
        (sent.lanes * other != part.lanes * whole, "LANE_MISMATCH", at(group, part, ".lanes")),
        (home.step != group.step, "ROW_MISMATCH", field("tokens_per_row")),
        (group.kind == SLOT && home.live_rows != group.live_rows, "ROW_MISMATCH", field("live_rows")),
        (home.partial != group.partial, "ROW_MISMATCH", field("partial")),
        (sent.encoding != part.encoding, "LAYOUT_OPAQUE", at(group, part, ".encoding")),
        (whole % other != 0 && other % whole != 0, "LANE_MISMATCH", at(group, part, ".lane_bytes")),
        (
            group.opaque() && (home.rows != group.rows || unfit || deal(home) != deal(group)),
            "LAYOUT_OPAQUE",
            field("rows"),
        ),
    ];
    match rows.iter().find(|row| row.0) {
        Some((_, code, path)) => refuse_at(code, path),
        None => Ok(()),
    }
}

/// Two runs share a token, in some period, where they do modulo the greatest common divisor of the periods.
fn meeting(from: &Group, to: &Group) -> Vec<(u64, u64)> {
    let deal = |it: &Group| match it.cp_size {
        1 => (1, 0),
        _ => (it.interleave, it.origin),
    };
    let ((a, begin), (b, other)) = (deal(from), deal(to));
    let (mut g, mut rest) = (a * from.places(), b * to.places());
    while rest > 0 {
        (g, rest) = (rest, g % rest);
    }
    let mut seen = vec![false; (from.cp_size * to.cp_size) as usize];
    for i in 0..from.places() {
        for j in 0..to.places() {
            let ahead = ((begin % g + i * a % g) + 2 * g - other % g - j * b % g) % g;
            if ahead < b || g - ahead < a {
                seen[(from.place(i) * to.cp_size + to.place(j)) as usize] = true;
            }
        }
    }
    let pairs = (0..seen.len() as u64).filter(|pair| seen[*pair as usize]);
    pairs.map(|pair| (pair / to.cp_size, pair % to.cp_size)).collect()
}
