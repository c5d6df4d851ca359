//! Who sends what to whom: planning.md.

use crate::description::{is_optional, Description, Group, Part, Share};
use crate::elect::{elect, Piece};
use crate::enums::{ErrorCode, FactRule, Feature, ItemKind};
use crate::error::{Error, Result};
use crate::facts::{MAX_CLASS_PAIRS, MAX_PIECES, MAX_RUNS};
use crate::sha256::Sha256;
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::format;
use alloc::rc::Rc;
use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;

/// Source rank, sink rank, sink group, model, first layer, layer after the last, part, first byte, byte after the last,
/// source cp rank, sink cp rank, ordinal.
pub(crate) type Row = [u64; 12];

/// Routes from one source replica to one sink replica.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Routes, by source rank, sink rank and sink group.
    pub routes: Vec<Route>,
    /// Draft models that start without their cache, as both sides agreed by feature COLD_DRAFT.
    pub cold: Vec<u32>,
    /// SHA-256 of all boxes, which Register and Registered state.
    pub digest: [u8; 32],
}

/// All that one source rank sends to one sink rank of one group.
#[derive(Clone, Debug)]
pub struct Route {
    /// Source rank.
    pub source: u32,
    /// Sink rank.
    pub sink: u32,
    /// The sink's group id.
    pub group: u32,
    /// SHA-256 of the boxes, which a RouteRef states.
    pub digest: [u8; 32],
    pub(crate) rows: Vec<Row>,
}

/// Layers of one part, bytes of its lane axis, and the rows of one token class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouteBox {
    /// Model: 0 for the target.
    pub model: u32,
    /// First layer, and the layer after the last.
    pub layers: (u32, u32),
    /// Index into the parts of the sink's group; for a part in sections, that of the first one.
    pub part: u32,
    /// First byte of the lane axis, and the byte after the last.
    pub bytes: (u64, u64),
    /// cp rank of these rows at the source, and at the sink.
    pub classes: (u32, u32),
}

impl Route {
    /// The boxes, in the order of the digest.
    pub fn boxes(&self) -> impl Iterator<Item = RouteBox> + '_ {
        self.rows.iter().map(|&[_, _, _, model, first, end, part, lo, hi, c, d, _]| RouteBox {
            model: model as u32,
            layers: (first as u32, end as u32),
            part: part as u32,
            bytes: (lo, hi),
            classes: (c as u32, d as u32),
        })
    }
}

impl Plan {
    /// The plan of two Descriptions, by the features that the session has chosen.
    ///
    /// # Errors
    ///
    /// The first thing in which the two do not fit, with what each side has (planning.md); `mine` is the sink's.
    pub fn new(source: &Description, sink: &Description, features: &[Feature]) -> Result<Plan> {
        plan(source, sink, Features::of(features))
    }

    /// Routes of one rank pair, by ascending group; none if the two exchange nothing.
    pub fn between(&self, source: u32, sink: u32) -> &[Route] {
        let key = |route: &Route| (route.source, route.sink);
        let begin = self.routes.partition_point(|route| key(route) < (source, sink));
        let end = self.routes.partition_point(|route| key(route) <= (source, sink));
        &self.routes[begin..end]
    }

    /// Source ranks from which a sink rank awaits Done, ascending.
    pub fn required(&self, sink: u32) -> Vec<u32> {
        let mut sources: Vec<u32> = self.routes.iter().filter(|it| it.sink == sink).map(|it| it.source).collect();
        sources.dedup();
        sources
    }

    /// Sink ranks that a source rank answers, ascending.
    pub fn served(&self, source: u32) -> Vec<u32> {
        let mut sinks: Vec<u32> = self.routes.iter().filter(|it| it.source == source).map(|it| it.sink).collect();
        sinks.dedup();
        sinks
    }
}

#[derive(Clone, Copy)]
pub(crate) struct Features {
    pub spread_one: bool,
    pub few_sources: bool,
    pub cold_draft: bool,
}

impl Features {
    fn of(features: &[Feature]) -> Features {
        Features {
            spread_one: features.contains(&Feature::SPREAD_ONE),
            few_sources: features.contains(&Feature::FEW_SOURCES),
            cold_draft: features.contains(&Feature::COLD_DRAFT),
        }
    }
}

/// SHA-256 of rows, numbers of 64 bits, little-endian.
fn digest<'a>(rows: impl Iterator<Item = &'a Row>) -> [u8; 32] {
    let mut digest = Sha256::new();
    for row in rows {
        let mut bytes = [0; 96];
        bytes.chunks_exact_mut(8).zip(row).for_each(|(place, number)| place.copy_from_slice(&number.to_le_bytes()));
        digest.update(&bytes);
    }
    digest.finish()
}

/// What one rank holds of a part: bytes of the lane axis, in its own order.
struct Held {
    rank: u64,
    cp_rank: u64,
    spans: Vec<(u64, u64)>,
}

/// Who holds a part: of each layer the group, and a place in `sets`, which are places in `held`, by ascending rank.
#[derive(Default)]
struct Holders {
    held: Vec<Held>,
    sets: Vec<Vec<usize>>,
    layers: BTreeMap<u64, (u64, usize)>,
}

/// By model and the name of the part.
type Owners<'a> = BTreeMap<(u64, &'a str), Holders>;

/// A group, and layers of it.
type List<'a> = (u64, &'a [u64]);

fn owners(description: &Description) -> Owners<'_> {
    // Ranks that hold the same layers are looked at together: there are few such lists, and many ranks.
    type Alike<'a> = BTreeMap<List<'a>, Vec<usize>>;
    let mut found: BTreeMap<(u64, &str), (Vec<Held>, Alike<'_>)> = BTreeMap::new();
    for rank in &description.ranks {
        for share in &rank.owns {
            let group = match description.group_of(share.group) {
                Some(group) => group,
                None => continue,
            };
            for (p, part) in group.firsts() {
                let (held, alike) = found.entry((group.model, &part.name[..])).or_default();
                alike.entry((group.id, &share.layers)).or_default().push(held.len());
                held.push(Held { rank: rank.rank, cp_rank: share.cp_rank, spans: spans(group, p, share) });
            }
        }
    }
    found.into_iter().map(|(key, (held, alike))| (key, Holders::of(held, alike.into_iter().collect()))).collect()
}

impl Holders {
    /// Of groups and layers those who hold them.
    fn of(held: Vec<Held>, alike: Vec<(List<'_>, Vec<usize>)>) -> Holders {
        let mut lists: BTreeMap<u64, (u64, Vec<usize>)> = BTreeMap::new();
        for (list, ((group, layers), _)) in alike.iter().enumerate() {
            for layer in *layers {
                lists.entry(*layer).or_insert((*group, Vec::new())).1.push(list);
            }
        }
        let (mut sets, mut known) = (Vec::new(), BTreeMap::new());
        let mut layers = BTreeMap::new();
        for (layer, (group, lists)) in lists {
            let set = *known.entry(lists).or_insert_with_key(|lists| {
                let mut places: Vec<usize> = lists.iter().flat_map(|list| &alike[*list].1).copied().collect();
                places.sort_unstable();
                sets.push(places);
                sets.len() - 1
            });
            layers.insert(layer, (group, set));
        }
        Holders { held, sets, layers }
    }

    fn of_set(&self, set: usize) -> Vec<&Held> {
        self.sets[set].iter().map(|place| &self.held[*place]).collect()
    }
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

fn plan(source: &Description, sink: &Description, features: Features) -> Result<Plan> {
    compare_facts(source, sink)?;
    let (theirs, ours) = (owners(source), owners(sink));
    let lacks = |model: u64| !theirs.keys().any(|key| key.0 == model);
    let cold: BTreeSet<u64> = match features.cold_draft {
        true => ours.keys().map(|key| key.0).filter(|model| *model > 0 && lacks(*model)).collect(),
        false => BTreeSet::new(),
    };
    let mut pairing = Pairing { source, pieces: Vec::new(), runs: 0, counted: 0, classes: BTreeMap::new() };
    let asked = || sink.groups.iter().filter(|group| !cold.contains(&group.model));
    for group in asked() {
        for (p, part) in group.firsts() {
            if let Some(holders) = ours.get(&(group.model, &part.name[..])) {
                pairing.part(group, p, holders, theirs.get(&(group.model, &part.name[..])))?;
            }
        }
    }
    for group in asked() {
        for part in &group.parts {
            if let Some(left) = left_behind(source, sink, group, part, &ours, &theirs) {
                let mine = Error::at(ErrorCode::PART_MISSING, &at(group, part, ""));
                return Err(mine.between("no part of this name", format!("part {}", left)));
            }
        }
    }
    let elected = elect(pairing.pieces, sink.geometry().replica.into(), features);
    let whole = digest(elected.values().flatten()); // rows begin with their key
    let route = |((source, sink, group), rows): ((u64, u64, u64), Vec<Row>)| Route {
        source: source as u32,
        sink: sink as u32,
        group: group as u32,
        digest: digest(rows.iter()),
        rows,
    };
    let cold = cold.into_iter().map(|model| model as u32).collect();
    Ok(Plan { routes: elected.into_iter().map(route).collect(), cold, digest: whole })
}

fn compare_facts(source: &Description, sink: &Description) -> Result<()> {
    let of = |it: &Description| -> BTreeMap<String, (String, FactRule)> {
        let facts = it.geometry().facts.iter();
        facts.map(|fact| (fact.name.clone(), (fact.value.clone(), fact.rule))).collect()
    };
    let (source, sink) = (of(source), of(sink));
    let names: BTreeSet<&String> = source.keys().chain(sink.keys()).collect();
    for name in names {
        let (a, b) = (source.get(name), sink.get(name));
        let strictest = a.iter().chain(b.iter()).map(|fact| fact.1).min();
        if strictest == Some(FactRule::Equal) && a.map(|fact| &fact.0) != b.map(|fact| &fact.0) {
            let said = |fact: Option<&(String, FactRule)>| fact.map_or("no such fact".into(), |fact| fact.0.clone());
            let wrong = Error::at(ErrorCode::IDENTITY_MISMATCH, &format!("facts[{}]", name));
            return Err(wrong.between(said(b), said(a)));
        }
    }
    Ok(())
}

/// A part that the source has, and that the sink lacks of a layer of which it takes this part.
fn left_behind<'a>(
    source: &Description,
    sink: &Description,
    group: &Group,
    part: &Part,
    ours: &Owners<'_>,
    theirs: &Owners<'a>,
) -> Option<&'a str> {
    let holders = match ours.get(&(group.model, &part.name[..])) {
        Some(holders) if group.kind != ItemKind::Handoff && !is_optional(&part.name) => holders,
        _ => return None,
    };
    let in_memory = |id: u64| source.group_of(id).map_or(false, |it| it.kind != ItemKind::Handoff);
    let layers = || holders.layers.iter().filter(|layer| layer.1 .0 == group.id).map(|layer| layer.0);
    let without = |name: &str| sink.geometry().without.iter().flatten().any(|it| it == name);
    let needed = |name: &str| !is_optional(name) && !without(name);
    let mut asked = theirs.iter().filter(|(key, _)| key.0 == group.model && needed(key.1));
    let left = asked.find(|(key, other)| {
        layers().any(|layer| {
            let there = other.layers.get(layer).map_or(false, |held| in_memory(held.0));
            there && !ours.get(*key).map_or(false, |it| it.layers.contains_key(layer))
        })
    });
    left.map(|(key, _)| key.1)
}

fn at(group: &Group, part: &Part, field: &str) -> String {
    format!("groups[{}].parts[{}]{}", group.name, part.name, field)
}

/// The parts of both sides, paired, compared and cut; and how much that comes to.
struct Pairing<'a> {
    source: &'a Description,
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
    /// Where intervals of either side begin or end.
    cuts: Vec<u64>,
}

impl<'a> Alike<'a> {
    fn new(
        home: &'a Group,
        sent: &'a Part,
        layers: Rc<Vec<u64>>,
        sending: Vec<&'a Held>,
        needy: Vec<&'a Held>,
    ) -> Alike<'a> {
        let spans = sending.iter().chain(&needy).flat_map(|held| &held.spans);
        let mut cuts: Vec<u64> = spans.flat_map(|span| [span.0, span.1]).collect();
        cuts.sort_unstable();
        cuts.dedup();
        Alike { home, sent, layers, sending, needy, cuts }
    }

    /// The place of a bound among the cuts, of which it is one.
    fn place(&self, byte: u64) -> usize {
        self.cuts.partition_point(|cut| *cut < byte)
    }

    /// How many pieces both sides' intervals come to (KVP-PLAN-SIZE), or so many that it is too much.
    fn size(&self, part: &Part, classes: &Classes) -> u64 {
        let mut all = 0u64;
        let lane = if self.sent.whole == part.whole { None } else { Some(self.sent.whole.min(part.whole)) };
        for (side, met) in [(&self.sending, &classes.sinks), (&self.needy, &classes.sources)] {
            for held in side {
                let times = (met[held.cp_rank as usize].len() * self.layers.len()) as u64;
                for &(lo, hi) in &held.spans {
                    let lanes = lane.map_or(0, |lane| (hi - 1) / lane - lo / lane + 1);
                    let pieces = (self.place(hi) - self.place(lo)) as u64 + lanes;
                    all = all.saturating_add(pieces.saturating_mul(times));
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
        let lacks = |code, layer: u64| {
            Err(Error::at(code, &at(group, part, "")).between(format!("layer {}", layer), "nobody has it"))
        };
        // The source's group of a layer, and who holds it on each side.
        let mut sets: BTreeMap<(u64, usize, usize), Vec<u64>> = BTreeMap::new();
        for (layer, (_, needy)) in layers() {
            if let Some((from, sending)) = theirs.and_then(|it| it.layers.get(layer)) {
                sets.entry((*from, *sending, *needy)).or_default().push(*layer);
            }
        }
        let mut alike = Vec::new();
        for (layer, (_, needy)) in layers() {
            let theirs = match theirs {
                Some(theirs) => theirs,
                None => return lacks(ErrorCode::PART_MISSING, *layer),
            };
            let (from, sending) = match theirs.layers.get(layer) {
                Some(held) => held,
                None => return lacks(ErrorCode::LAYER_MISSING, *layer),
            };
            let home = source.group_of(*from);
            let (home, sent) =
                match home.and_then(|home| Some((home, home.parts.iter().find(|it| it.name == part.name)?))) {
                    Some(both) => both,
                    None => return lacks(ErrorCode::PART_MISSING, *layer),
                };
            compare(home, sent, group, part)?;
            self.classes(home, group, part)?;
            let layers = match sets.remove(&(*from, *sending, *needy)) {
                Some(layers) => Rc::new(layers),
                None => continue,
            };
            let (sending, needy) = (theirs.of_set(*sending), ours.of_set(*needy));
            if part.encoding.is_none() {
                alike.push(Alike::new(home, sent, layers, sending, needy));
                continue;
            }
            for family in needy.iter().map(|held| &held.spans).collect::<BTreeSet<_>>() {
                let of = |side: &[&'_ Held]| -> Vec<usize> {
                    (0..side.len()).filter(|one| side[*one].spans == *family).collect()
                };
                let sending: Vec<&Held> = of(&sending).into_iter().map(|one| sending[one]).collect();
                let needy: Vec<&Held> = of(&needy).into_iter().map(|one| needy[one]).collect();
                if sending.is_empty() {
                    let wrong = Error::at(ErrorCode::LAYOUT_OPAQUE, &at(group, part, ""));
                    return Err(wrong.between("the lanes of a sink rank", "no rank with just these"));
                }
                alike.push(Alike::new(home, sent, layers.clone(), sending, needy));
            }
        }
        for some in &alike {
            let classes = self.classes(some.home, group, part)?;
            self.counted = self.counted.saturating_add(some.size(part, &classes));
            if self.counted > MAX_PIECES {
                let wrong = Error::at(ErrorCode::TOO_LARGE, &at(group, part, ""));
                return Err(wrong.between(format!("at most {} pieces", MAX_PIECES), "more"));
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
            let wrong = Error::at(ErrorCode::ROW_MISMATCH, &format!("groups[{}].cp_size", to.name));
            return Err(wrong.between(to.cp_size, from.cp_size));
        }
        self.runs += [from, to].into_iter().filter(|group| group.cp_size > 1).map(Group::places).sum::<u64>();
        if self.runs > MAX_RUNS {
            return Err(Error::at(ErrorCode::TOO_LARGE, &at(to, part, "")).between(MAX_RUNS, self.runs));
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

    fn cut(&mut self, group: &Group, p: usize, alike: &Alike<'_>) -> Result<()> {
        let part = &group.parts[p];
        let classes = self.classes(alike.home, group, part)?;
        let mut sides: [BTreeMap<(usize, u64), Vec<u64>>; 2] = Default::default();
        for (side, some) in sides.iter_mut().zip([&alike.sending, &alike.needy]) {
            for held in some {
                for span in &held.spans {
                    for i in alike.place(span.0)..alike.place(span.1) {
                        side.entry((i, held.cp_rank)).or_default().push(held.rank);
                    }
                }
            }
        }
        let [held, wanted] = sides;
        let held: BTreeMap<_, _> = held.into_iter().map(|(key, ranks)| (key, Rc::new(ranks))).collect();
        for ((i, d), needy) in wanted {
            let needy = Rc::new(needy);
            for &c in &classes.sources[d as usize] {
                let candidates = match held.get(&(i, c)) {
                    Some(candidates) => candidates.clone(),
                    None => {
                        let mine = format!("bytes {} to {}", alike.cuts[i], alike.cuts[i + 1]);
                        let wrong = Error::at(ErrorCode::COVERAGE, &at(group, part, ""));
                        return Err(wrong.between(mine, "no rank that has them"));
                    }
                };
                self.pieces.push(Piece {
                    group: group.id,
                    model: group.model,
                    part: p as u64,
                    layers: alike.layers.clone(),
                    lo: alike.cuts[i],
                    hi: alike.cuts[i + 1],
                    classes: (c, d),
                    candidates,
                    needy: needy.clone(),
                });
            }
        }
        Ok(())
    }
}

/// A layer of a part, by the rows of the table of planning.md.
fn compare(home: &Group, sent: &Part, group: &Group, part: &Part) -> Result<()> {
    let streams = |it: &Group| it.kind == ItemKind::Page || it.kind == ItemKind::Ring;
    let flows = streams(home) && streams(group) && !group.opaque();
    let deal = |it: &Group| match it.cp_size {
        1 => None,
        n if it.order.is_empty() => Some((n, it.interleave, it.origin, (0..n).collect::<Vec<u64>>())),
        n => Some((n, it.interleave, it.origin, it.order.clone())),
    };
    let (whole, other) = (part.whole, sent.whole);
    let unfit = part.encoding.is_some() && whole != other;
    let field = |name: &str| format!("groups[{}].{}", group.name, name);
    let encoding = |it: &Part| it.encoding.clone().unwrap_or_else(|| "none".into());
    type Words = (String, String);
    let numbers = |mine: u64, yours: u64| -> Words { (format!("{}", mine), format!("{}", yours)) };
    let wrong = |code, path: String, (mine, yours): Words| Err(Error::at(code, &path).between(mine, yours));
    if home.kind != group.kind && !flows {
        let kinds = (format!("{}", group.kind), format!("{}", home.kind));
        return wrong(ErrorCode::KIND_MISMATCH, field("kind"), kinds);
    }
    if home.axis != group.axis {
        return wrong(ErrorCode::AXIS_MISMATCH, field("axis"), (group.axis.clone(), home.axis.clone()));
    }
    if sent.dtype != part.dtype {
        let dtypes = (format!("{}", part.dtype), format!("{}", sent.dtype));
        return wrong(ErrorCode::DTYPE_MISMATCH, at(group, part, ".dtype"), dtypes);
    }
    if sent.lanes * other != part.lanes * whole {
        let axes = |it: &Part| format!("{} lanes of {} bytes", it.lanes, it.whole);
        return wrong(ErrorCode::LANE_MISMATCH, at(group, part, ".lanes"), (axes(part), axes(sent)));
    }
    if home.step != group.step {
        return wrong(ErrorCode::ROW_MISMATCH, field("tokens_per_row"), numbers(group.step, home.step));
    }
    if group.kind == ItemKind::Slot && home.live_rows != group.live_rows {
        return wrong(ErrorCode::ROW_MISMATCH, field("live_rows"), numbers(group.live_rows, home.live_rows));
    }
    if home.partial != group.partial {
        let partial = (format!("{}", group.partial), format!("{}", home.partial));
        return wrong(ErrorCode::ROW_MISMATCH, field("partial"), partial);
    }
    if sent.encoding != part.encoding {
        return wrong(ErrorCode::LAYOUT_OPAQUE, at(group, part, ".encoding"), (encoding(part), encoding(sent)));
    }
    if whole % other != 0 && other % whole != 0 {
        return wrong(ErrorCode::LANE_MISMATCH, at(group, part, ".lane_bytes"), numbers(whole, other));
    }
    if group.opaque() && (home.rows != group.rows || unfit || deal(home) != deal(group)) {
        return wrong(ErrorCode::LAYOUT_OPAQUE, field("rows"), numbers(group.rows, home.rows));
    }
    Ok(())
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
