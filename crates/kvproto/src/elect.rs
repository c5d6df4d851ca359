//! Which source rank each needy rank reads a piece from, and the boxes that this comes to: planning.md, 4 and 5.

use crate::plan::{Features, Row};
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::rc::Rc;
use alloc::vec;
use alloc::vec::Vec;

/// Bytes between two cuts, of layers that the same ranks hold, for one pair of cp ranks.
pub(crate) struct Piece {
    pub group: u64,
    pub model: u64,
    pub part: u64,
    pub layers: Rc<Vec<u64>>,
    pub lo: u64,
    pub hi: u64,
    pub classes: (u64, u64),
    pub candidates: Rc<Vec<u64>>,
    pub needy: Rc<Vec<u64>>,
}

/// Sink group, layer, needy ranks, each with the number of its first unit.
type Entries = BTreeMap<(u64, u64, Rc<Vec<u64>>), usize>;
/// Of each source rank, sink rank, sink group, part and class the model, and bytes of layers.
type Loose = BTreeMap<(u64, u64, u64, u64, (u64, u64)), (u64, Vec<(Layers, u64, u64)>)>;

/// All layers of a piece, or one of them.
enum Layers {
    All(Rc<Vec<u64>>),
    One(u64),
}

pub(crate) fn elect(pieces: Vec<Piece>, ordinal: u64, features: Features) -> BTreeMap<(u64, u64, u64), Vec<Row>> {
    let mut loose = Loose::new();
    let mut dealt: BTreeMap<(usize, Rc<Vec<u64>>), Entries> = BTreeMap::new();
    let mut awaited = BTreeSet::new();
    let mut give = |piece: &Piece, layers: Layers, source: u64, sink: u64| {
        let route = loose.entry((source, sink, piece.group, piece.part, piece.classes));
        route.or_insert((piece.model, Vec::new())).1.push((layers, piece.lo, piece.hi));
    };
    for piece in &pieces {
        let (c, m) = (piece.candidates.len(), piece.needy.len());
        if m >= c || features.spread_one {
            for (j, needy) in piece.needy.iter().enumerate() {
                let source = piece.candidates[j * c / m];
                awaited.insert((*needy, source));
                give(piece, Layers::All(piece.layers.clone()), source, *needy);
            }
        } else {
            let entries = dealt.entry((c, piece.candidates.clone())).or_default();
            for layer in piece.layers.iter() {
                entries.insert((piece.group, *layer, piece.needy.clone()), 0);
            }
        }
    }
    let mut sources = BTreeMap::new();
    for ((_, candidates), entries) in &mut dealt {
        let mut units = Vec::new();
        for ((_, _, needy), first) in entries.iter_mut() {
            *first = units.len();
            units.extend(needy.iter().copied());
        }
        let placed = match features.few_sources {
            true => few(candidates, &units, ordinal, &mut awaited),
            false => (0..units.len()).map(|u| turn(candidates, u, ordinal)).collect(),
        };
        sources.insert(candidates.clone(), placed);
    }
    for piece in &pieces {
        let entries = dealt.get(&(piece.candidates.len(), piece.candidates.clone()));
        let (placed, entries) = match (sources.get(&piece.candidates), entries) {
            (Some(placed), Some(entries)) if piece.needy.len() < piece.candidates.len() => (placed, entries),
            _ => continue,
        };
        for layer in piece.layers.iter() {
            let first = entries[&(piece.group, *layer, piece.needy.clone())];
            for (j, needy) in piece.needy.iter().enumerate() {
                give(piece, Layers::One(*layer), placed[first + j], *needy);
            }
        }
    }
    join(loose, ordinal)
}

fn turn(candidates: &[u64], unit: usize, ordinal: u64) -> u64 {
    candidates[((unit as u64 + ordinal) % candidates.len() as u64) as usize]
}

/// Feature FEW_SOURCES: the source of each unit, of which `units` says the needy rank.
fn few(candidates: &[u64], units: &[u64], ordinal: u64, awaited: &mut BTreeSet<(u64, u64)>) -> Vec<u64> {
    let c = candidates.len();
    let bound = 2 * ceil(units.len(), c);
    let mut of: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
    for (u, needy) in units.iter().enumerate() {
        of.entry(*needy).or_default().push(u);
    }
    let m = of.len();
    let mut runs = Vec::new();
    for (j, (needy, own)) in of.iter().enumerate() {
        let (x, a) = (own.len(), ceil(own.len(), bound));
        for run in 0..a {
            let some: Vec<usize> = (0..x).filter(|i| i * a / x == run).map(|i| own[i]).collect();
            runs.push((j, *needy, some));
        }
    }
    runs.sort_by_key(|run| core::cmp::Reverse(run.2.len()));
    let (mut load, mut placed) = (vec![0; c], vec![0; units.len()]);
    for (j, needy, run) in runs {
        let first = ((j * c / m) as u64 + ordinal) as usize % c;
        let round = || (0..c).map(|i| (first + i) % c);
        let known = |i: &usize| awaited.contains(&(needy, candidates[*i])) && load[*i] + run.len() <= bound;
        let choice = round().filter(known).min_by_key(|i| load[*i]).or_else(|| round().min_by_key(|i| load[*i]));
        if let Some(choice) = choice {
            load[choice] += run.len();
            awaited.insert((needy, candidates[choice]));
            run.into_iter().for_each(|unit| placed[unit] = candidates[choice]);
        }
    }
    placed
}

fn ceil(a: usize, b: usize) -> usize {
    (a + b - 1) / b
}

/// Of each layer the longest intervals, then equal ones of consecutive layers.
fn join(loose: Loose, ordinal: u64) -> BTreeMap<(u64, u64, u64), Vec<Row>> {
    let mut routes: BTreeMap<(u64, u64, u64), Vec<Row>> = BTreeMap::new();
    for ((source, sink, group, part, (c, d)), (model, given)) in loose {
        let rows = routes.entry((source, sink, group)).or_default();
        let mut close = |(lo, hi): (u64, u64), (first, last): (u64, u64)| {
            rows.push([source, sink, group, model, first, last + 1, part, lo, hi, c, d, ordinal]);
        };
        match same_layers(&given) {
            Some(layers) => {
                let long = longest(given.iter().map(|it| (it.1, it.2)).collect());
                for run in runs(layers) {
                    long.iter().for_each(|span| close(*span, run));
                }
            }
            None => join_layers(&given, close),
        }
    }
    routes.values_mut().for_each(|rows| rows.sort_unstable());
    routes
}

/// The layers of all bytes, if they are of one list.
fn same_layers(given: &[(Layers, u64, u64)]) -> Option<&[u64]> {
    let lists = given.iter().map(|it| match &it.0 {
        Layers::All(layers) => Some(layers),
        Layers::One(_) => None,
    });
    let lists = lists.collect::<Option<Vec<&Rc<Vec<u64>>>>>()?;
    let first = lists.first()?;
    lists.iter().all(|list| Rc::ptr_eq(list, first)).then(|| first.as_slice())
}

/// The first and last of layers that follow each other.
fn runs(layers: &[u64]) -> Vec<(u64, u64)> {
    let mut runs: Vec<(u64, u64)> = Vec::new();
    for layer in layers {
        match runs.last_mut() {
            Some(run) if run.1 + 1 == *layer => run.1 = *layer,
            _ => runs.push((*layer, *layer)),
        }
    }
    runs
}

/// Intervals, of which those that touch are one.
fn longest(mut spans: Vec<(u64, u64)>) -> Vec<(u64, u64)> {
    spans.sort_unstable();
    let mut long: Vec<(u64, u64)> = Vec::new();
    for (lo, hi) in spans {
        match long.last_mut() {
            Some(last) if last.1 == lo => last.1 = hi,
            _ => long.push((lo, hi)),
        }
    }
    long
}

fn join_layers(given: &[(Layers, u64, u64)], mut close: impl FnMut((u64, u64), (u64, u64))) {
    let mut layers: BTreeMap<u64, Vec<(u64, u64)>> = BTreeMap::new();
    for (of, lo, hi) in given {
        let some = match of {
            Layers::All(layers) => layers.as_slice(),
            Layers::One(layer) => core::slice::from_ref(layer),
        };
        some.iter().for_each(|layer| layers.entry(*layer).or_default().push((*lo, *hi)));
    }
    let mut open: BTreeMap<(u64, u64), (u64, u64)> = BTreeMap::new();
    for (layer, spans) in layers {
        for span in longest(spans) {
            match open.get_mut(&span) {
                Some(run) if run.1 + 1 == layer => run.1 = layer,
                Some(run) => close(span, core::mem::replace(run, (layer, layer))),
                None => drop(open.insert(span, (layer, layer))),
            }
        }
    }
    open.into_iter().for_each(|(span, run)| close(span, run));
}
