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
    let mut pairing = Pairing { source, pieces: Vec::new(), runs: 0, counted: 0, classes: BTreeMap::new() };
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
    runs: u64,
    counted: u64,
    /// By group of the source and of the sink.
    classes: BTreeMap<(u64, u64), Rc<Classes>>,
}

/// Which cp ranks of two groups share rows: of each of the source those of the sink, and the other way round.
struct Classes {
    sinks: Vec<Vec<u64>>,
    sources: Vec<Vec<u64>>,
}

/// Layers that the same ranks hold, who of the source may send them, and who of the sink needs them.
struct Alike<'a> {
    home: &'a Group,
    sent: &'a Part,
    layers: Rc<Vec<u64>>,
    sending: Vec<&'a Held>,
    needy: Vec<&'a Held>,
}

impl Alike<'_> {
    /// Where intervals of either side begin or end.
    fn cuts(&self) -> Vec<u64> {
        let spans = self.sending.iter().chain(&self.needy).flat_map(|held| &held.spans);
        spans.flat_map(|span| [span.0, span.1]).collect::<BTreeSet<u64>>().into_iter().collect()
    }

    /// How many pieces both sides' intervals come to (KVP-PLAN-SIZE), or so many that it is too much.
    fn size(&self, part: &Part, classes: &Classes) -> u64 {
        let (cuts, mut all) = (self.cuts(), 0);
        let lane = if self.sent.whole == part.whole { None } else { Some(self.sent.whole.min(part.whole)) };
        let place = |byte: u64| cuts.binary_search(&byte).expect("a cut") as u64;
        for (side, met) in [(&self.sending, &classes.sinks), (&self.needy, &classes.sources)] {
            for held in side {
                for &(lo, hi) in &held.spans {
                    let lanes = lane.map_or(0, |lane| (hi - 1) / lane - lo / lane + 1);
                    let pieces = place(hi) - place(lo) + lanes;
                    all += pieces * met[held.cp_rank as usize].len() as u64 * self.layers.len() as u64;
                    if all > MAX_PIECES {
                        return all;
                    }
                }
            }
        }
        all
    }
}

impl Pairing<'_> {
    fn part(&mut self, group: &Group, p: usize, ours: &Holders, theirs: Option<&Holders>) -> Result<()> {
        let part = &group.parts[p];
        let source = self.source;
        let layers = || ours.layers.iter().filter(|layer| layer.1 .0 == group.id);
        let mut sets: BTreeMap<(u64, &[usize], &[usize]), Vec<u64>> = BTreeMap::new();
        for (layer, (_, needy)) in layers() {
            if let Some((from, sending)) = theirs.and_then(|it| it.layers.get(layer)) {
                sets.entry((*from, sending, needy)).or_default().push(*layer);
            }
        }
        let mut alike = Vec::new();
        for (layer, (_, needy)) in layers() {
            let theirs = match theirs {
                Some(theirs) => theirs,
                None => return refuse_at("PART_MISSING", &at(group, part, "")),
            };
            let (from, sending) = match theirs.layers.get(layer) {
                Some(held) => held,
                None => return refuse_at("LAYER_MISSING", &at(group, part, "")),
            };
            let home = source.group(*from).expect("owners have a group");
            let sent = home.parts.iter().find(|it| it.name == part.name).expect("owners have the part");
            compare(home, sent, group, part)?;
            self.classes(home, group, part)?;
            let layers = match sets.remove(&(*from, &sending[..], &needy[..])) {
                Some(layers) => Rc::new(layers),
                None => continue,
            };
            let sending: Vec<&Held> = sending.iter().map(|one| &theirs.held[*one]).collect();
            let needy: Vec<&Held> = needy.iter().map(|one| &ours.held[*one]).collect();
            if part.encoding.is_none() {
                alike.push(Alike { home, sent, layers, sending, needy });
                continue;
            }
            for family in needy.iter().map(|held| &held.spans).collect::<BTreeSet<_>>() {
                let of = |side: &[&'_ Held]| -> Vec<usize> {
                    (0..side.len()).filter(|one| side[*one].spans == *family).collect()
                };
                let sending: Vec<&Held> = of(&sending).into_iter().map(|one| sending[one]).collect();
                let needy: Vec<&Held> = of(&needy).into_iter().map(|one| needy[one]).collect();
                if sending.is_empty() {
                    return refuse_at("LAYOUT_OPAQUE", &at(group, part, ""));
                }
                alike.push(Alike { home, sent, layers: layers.clone(), sending, needy });
            }
        }
        for some in &alike {
            self.counted += some.size(part, &*self.classes(some.home, group, part)?);
            if self.counted > MAX_PIECES {
                return refuse_at("TOO_LARGE", &at(group, part, ""));
            }
        }
        alike.iter().try_for_each(|some| self.cut(group, p, some))
    }

    /// Which cp ranks of two groups share a row at all.
    fn classes(&mut self, from: &Group, to: &Group, part: &Part) -> Result<Rc<Classes>> {
        if let Some(known) = self.classes.get(&(from.id, to.id)) {
            return Ok(known.clone());
        }
        if from.cp_size * to.cp_size > MAX_CLASS_PAIRS {
            return refuse_at("ROW_MISMATCH", &format!("groups[{}].cp_size", to.name));
        }
        self.runs += [from, to].into_iter().filter(|group| group.cp_size > 1).map(Group::places).sum::<u64>();
        if self.runs > MAX_RUNS {
            return refuse_at("TOO_LARGE", &at(to, part, ""));
        }
        let empty = |group: &Group| vec![Vec::new(); group.cp_size as usize];
        let mut classes = Classes { sinks: empty(from), sources: empty(to) };
        for (c, d) in meeting(from, to) {
            classes.sinks[c as usize].push(d);
            classes.sources[d as usize].push(c);
        }
        let classes = Rc::new(classes);
        self.classes.insert((from.id, to.id), classes.clone());
        Ok(classes)
    }

    fn cut(&mut self, group: &Group, p: usize, alike: &Alike) -> Result<()> {
        let (part, cuts) = (&group.parts[p], alike.cuts());
        let classes = self.classes(alike.home, group, part)?;
        let place = |byte: u64| cuts.binary_search(&byte).expect("a cut");
        let mut sides: [BTreeMap<(usize, u64), Vec<u64>>; 2] = Default::default();
        for (side, some) in sides.iter_mut().zip([&alike.sending, &alike.needy]) {
            for held in some {
                for span in &held.spans {
                    for i in place(span.0)..place(span.1) {
                        side.entry((i, held.cp_rank)).or_default().push(held.rank);
                    }
                }
            }
        }
        let [held, wanted] = sides;
        for ((i, d), needy) in wanted {
            let needy = Rc::new(needy);
            for &c in &classes.sources[d as usize] {
                let candidates = match held.get(&(i, c)) {
                    Some(candidates) => candidates,
                    None => return refuse_at("COVERAGE", &at(group, part, "")),
                };
                self.pieces.push(Piece {
                    group: group.id,
                    model: group.model,
                    part: p as u64,
                    layers: alike.layers.clone(),
                    lo: cuts[i],
                    hi: cuts[i + 1],
                    classes: (c, d),
                    candidates: Rc::new(candidates.clone()),
                    needy: needy.clone(),
                });
            }
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
