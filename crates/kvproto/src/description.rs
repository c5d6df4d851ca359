//! A Description: what the ranks of a replica own (model.md, parts.md, handoff.md).

use crate::body::Body;
use crate::enums::{ErrorCode, ItemKind};
use crate::error::{Error, Result};
use crate::facts::{
    MAX_CLAIMS, MAX_DEAL, MAX_GEOMETRY, MAX_LAYERS, MAX_PARTS, MAX_RANKS, MAX_RANK_CLAIMS, MAX_RUNS, PARTS,
};
use crate::messages::{self, Geometry};
use crate::sha256::Sha256;
use alloc::borrow::ToOwned;
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

/// A Geometry without fault, its bytes and its digest.
#[derive(Clone, Debug)]
pub struct Description {
    geometry: Geometry,
    bytes: Vec<u8>,
    digest: [u8; 32],
    pub(crate) groups: Vec<Group>,
    pub(crate) ranks: Vec<Rank>,
}

/// What a rank owns, by ascending group.
#[derive(Clone, Debug)]
pub(crate) struct Rank {
    pub rank: u64,
    pub owns: Vec<Share>,
}

#[derive(Clone, Debug)]
pub(crate) struct Share {
    pub group: u64,
    pub layers: Vec<u64>,
    pub cp_rank: u64,
    /// Part, first lane, lane after the last.
    pub lanes: Vec<(usize, u64, u64)>,
}

/// A group of a Description: the shape of its items, and how its tokens are dealt to ranks (dcp.md).
#[derive(Clone, Debug)]
pub struct Group {
    pub(crate) id: u64,
    pub(crate) name: String,
    pub(crate) model: u64,
    pub(crate) kind: ItemKind,
    pub(crate) rows: u64,
    pub(crate) step: u64,
    pub(crate) live_rows: u64,
    pub(crate) cp_size: u64,
    pub(crate) interleave: u64,
    pub(crate) origin: u64,
    /// Empty where none is stated, or where it says nothing.
    pub(crate) order: Vec<u64>,
    /// Of each place of the order, how many places before it, and how many in all, are of the same cp rank.
    pub(crate) turns: Vec<(u64, u64)>,
    pub(crate) partial: bool,
    pub(crate) axis: String,
    pub(crate) parts: Vec<Part>,
}

#[derive(Clone, Debug)]
pub(crate) struct Part {
    pub name: String,
    pub dtype: crate::DType,
    pub lanes: u64,
    pub lane_bytes: u64,
    pub at: u64,
    pub whole: u64,
    pub encoding: Option<String>,
    /// Index of the first part of this name, which stands for all of its sections.
    pub first: usize,
}

impl Description {
    /// A Description of a Geometry.
    ///
    /// # Errors
    ///
    /// What no writer may write, then `BAD_GEOMETRY` at what is wrong with it.
    pub fn new(geometry: Geometry) -> Result<Description> {
        let bytes = crate::encode_struct(&geometry)?;
        Description::checked(geometry, bytes)
    }

    /// A Description of the canonical bytes that Describe and Description carry.
    ///
    /// # Errors
    ///
    /// The first thing that a strict reader refuses, then `BAD_GEOMETRY` at what is wrong with it.
    pub fn decode(bytes: &[u8]) -> Result<Description> {
        Description::checked(crate::decode_struct(bytes)?, bytes.to_vec())
    }

    /// A Description of the JSON form of a Geometry.
    ///
    /// # Errors
    ///
    /// The first thing that a reader of the JSON form refuses, then `BAD_GEOMETRY` at what is wrong with it.
    pub fn from_json(json: &crate::json::Json) -> Result<Description> {
        let record = crate::json::from_json(Geometry::layout(), json)?;
        Description::new(Geometry::from_record(record)?)
    }

    fn checked(geometry: Geometry, bytes: Vec<u8>) -> Result<Description> {
        if bytes.len() as u64 > MAX_GEOMETRY {
            return Err(bad("geometry").between(format!("at most {} bytes", MAX_GEOMETRY), bytes.len()));
        }
        let groups = geometry.groups.iter().map(Group::of).collect();
        let ranks = geometry.ranks.iter().map(Rank::of).collect();
        let digest = Sha256::of(&bytes);
        let made = Description { geometry, bytes, digest, groups, ranks };
        made.check_sizes()?;
        for (i, group) in made.groups.iter().enumerate() {
            group.check().map_err(|error| error.under(&format!("groups[{}]", i)))?;
        }
        made.check_shares()?;
        Ok(made)
    }

    /// What it was made of.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Its canonical bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// SHA-256 of its canonical bytes.
    pub fn digest(&self) -> &[u8; 32] {
        &self.digest
    }

    /// The group of an id.
    pub fn group(&self, id: u32) -> Option<&Group> {
        self.group_of(id.into())
    }

    pub(crate) fn group_of(&self, id: u64) -> Option<&Group> {
        self.groups.binary_search_by_key(&id, |group| group.id).ok().map(|place| &self.groups[place])
    }

    /// What a rank owns; nothing if there is no such rank.
    pub(crate) fn shares(&self, rank: u64) -> &[Share] {
        let place = self.ranks.binary_search_by_key(&rank, |it| it.rank);
        place.map_or(&[], |place| &self.ranks[place].owns)
    }

    fn check_sizes(&self) -> Result<()> {
        let parts: usize = self.groups.iter().map(|group| group.parts.len()).sum();
        let runs: usize = self.geometry.groups.iter().filter_map(|group| Some(group.order.as_ref()?.len())).sum();
        at_most("groups", "parts", parts as u64, MAX_PARTS)?;
        at_most("groups", "runs of deals", runs as u64, MAX_RUNS)?;
        let claims = self.ranks.iter().map(|rank| sum(rank.owns.iter().map(|share| self.claims(share))));
        let claims: Vec<u64> = claims.collect();
        at_most("ranks", "ranks", self.ranks.len() as u64, MAX_RANKS)?;
        at_most("ranks", "claims", sum(claims.iter().copied()), MAX_CLAIMS)?;
        at_most("ranks", "claims of a rank", claims.iter().max().copied().unwrap_or(0), MAX_RANK_CLAIMS)
    }

    fn claims(&self, share: &Share) -> u64 {
        let parts = self.group_of(share.group).map_or(&[][..], |group| &group.parts[..]);
        let spans = share.lanes.iter().map(|&(part, lo, hi)| match parts.get(part) {
            Some(it) if it.whole != it.lane_bytes => hi - lo,
            _ => 1,
        });
        sum(spans).saturating_mul(share.layers.len() as u64)
    }

    fn check_shares(&self) -> Result<()> {
        let mut homes = BTreeMap::new();
        for (i, rank) in self.ranks.iter().enumerate() {
            for (j, share) in rank.owns.iter().enumerate() {
                let checked = self.check_share(share, &mut homes);
                checked.map_err(|error| error.under(&format!("ranks[{}].owns[{}]", i, j)))?;
            }
        }
        Ok(())
    }

    fn check_share<'a>(&'a self, share: &Share, homes: &mut BTreeMap<(u64, &'a str, u64), u64>) -> Result<()> {
        let group = match self.group_of(share.group) {
            Some(group) => group,
            None => return Err(bad("group").between("a group of the Description", share.group)),
        };
        if group.kind == ItemKind::Handoff && share.layers != [0] {
            return Err(bad("layers").between("layer 0 alone, of hand-off data", "other layers"));
        }
        if share.cp_rank >= group.cp_size {
            return Err(bad("cp_rank").between(format!("below {}", group.cp_size), share.cp_rank));
        }
        for (k, &(part, _, hi)) in share.lanes.iter().enumerate() {
            match group.parts.get(part) {
                None => {
                    let parts = format!("one of {} parts", group.parts.len());
                    return Err(bad(&format!("lanes[{}].part", k)).between(parts, part));
                }
                Some(it) if hi > it.lanes => {
                    return Err(bad(&format!("lanes[{}].hi", k)).between(format!("{} lanes", it.lanes), hi));
                }
                _ => (),
            }
        }
        let mut spans = share.lanes.clone();
        spans.sort_unstable();
        let stated: BTreeSet<usize> = spans.iter().map(|span| span.0).collect();
        if spans.windows(2).any(|pair| pair[0].0 == pair[1].0 && pair[1].1 < pair[0].2) {
            return Err(bad("lanes").between("each lane once", "a lane twice"));
        }
        if stated.len() != group.parts.len() {
            return Err(bad("lanes").between("lanes of every part", format!("of {}", stated.len())));
        }
        for part in &group.parts {
            for layer in &share.layers {
                let home = *homes.entry((group.model, &part.name[..], *layer)).or_insert(group.id);
                if home != group.id {
                    let mine = format!("layer {} of {} in one group", layer, part.name);
                    return Err(bad("layers").between(mine, format!("in groups {} and {}", home, group.id)));
                }
            }
        }
        at_most("layers", "layers of parts", homes.len() as u64, MAX_LAYERS)
    }
}

fn bad(path: &str) -> Error {
    Error::at(ErrorCode::BAD_GEOMETRY, path)
}

fn at_most(path: &str, of: &str, count: u64, most: u64) -> Result<()> {
    if count > most {
        return Err(bad(path).between(format!("at most {} {}", most, of), count));
    }
    Ok(())
}

fn sum(numbers: impl Iterator<Item = u64>) -> u64 {
    numbers.fold(0, u64::saturating_add)
}

impl Rank {
    fn of(it: &messages::Rank) -> Rank {
        let share = |it: &messages::Owns| Share {
            group: it.group.into(),
            layers: it.layers.iter().copied().map(u64::from).collect(),
            cp_rank: it.cp_rank.into(),
            lanes: it.lanes.iter().map(|lane| (lane.part as usize, lane.lo.into(), lane.hi.into())).collect(),
        };
        Rank { rank: it.rank.into(), owns: it.owns.iter().map(share).collect() }
    }
}

impl Group {
    /// A group without a Description, as for engines that deal tokens by it.
    ///
    /// # Errors
    ///
    /// What no writer may write, then `BAD_GEOMETRY` at what is wrong with it.
    pub fn new(group: &messages::Group) -> Result<Group> {
        group.to_record().check()?;
        let made = Group::of(group);
        made.check()?;
        Ok(made)
    }

    fn of(it: &messages::Group) -> Group {
        let part = |part: &messages::Part| Part {
            name: part.name.clone(),
            dtype: part.dtype,
            lanes: part.lanes.into(),
            lane_bytes: part.lane_bytes.into(),
            at: part.at.unwrap_or(0).into(),
            whole: part.whole.unwrap_or(part.lane_bytes).into(),
            encoding: part.encoding.clone(),
            first: it.parts.iter().position(|other| other.name == part.name).unwrap_or(0),
        };
        let order: Vec<u64> = it.order.iter().flatten().copied().map(u64::from).collect();
        let order = if it.cp_size == 1 { Vec::new() } else { order };
        Group {
            id: it.id.into(),
            name: it.name.clone(),
            model: it.model.into(),
            kind: it.kind,
            rows: it.rows.into(),
            step: it.tokens_per_row.into(),
            live_rows: it.live_rows.unwrap_or(it.rows).into(),
            cp_size: it.cp_size.into(),
            interleave: it.interleave.into(),
            origin: it.origin,
            turns: turns(&order),
            order,
            partial: it.partial.unwrap_or(false),
            axis: it.axis.clone().unwrap_or_else(|| "tokens".to_owned()),
            parts: it.parts.iter().map(part).collect(),
        }
    }

    /// Whether its items move whole.
    pub(crate) fn opaque(&self) -> bool {
        self.parts.iter().any(|part| part.encoding.is_some())
    }

    /// The first part of each name, with its index.
    pub(crate) fn firsts(&self) -> impl Iterator<Item = (usize, &Part)> {
        self.parts.iter().enumerate().filter(|(p, part)| part.first == *p)
    }

    fn check(&self) -> Result<()> {
        self.check_sections()?;
        if self.kind == ItemKind::Handoff {
            let cut = self.parts.iter().any(|part| part.lanes > 1 || part.whole != part.lane_bytes);
            if cut || self.model != 0 || self.rows != 1 || self.step != 1 {
                return Err(bad("kind").between("hand-off data of one row, of parts of one lane", "another shape"));
            }
        }
        if self.partial && self.kind != ItemKind::Page && self.kind != ItemKind::Ring {
            return Err(bad("partial").between("PAGE or RING", self.kind));
        }
        let mut called = BTreeMap::new();
        for part in &self.parts {
            if *called.entry(registered(&part.name)).or_insert(&part.name) != &part.name {
                return Err(bad("parts").between("one part of a registered name", registered(&part.name)));
            }
        }
        if self.cp_size == 1 {
            return Ok(());
        }
        if self.kind != ItemKind::Page || self.interleave % self.step != 0 || self.origin % self.step != 0 {
            return Err(bad("interleave").between("pages, and whole rows to a rank", self.interleave));
        }
        if !self.order.is_empty() {
            let stated: BTreeSet<u64> = self.order.iter().copied().collect();
            if stated.len() as u64 != self.cp_size || stated.iter().next_back() != Some(&(self.cp_size - 1)) {
                return Err(bad("order").between(format!("every cp rank below {}", self.cp_size), "others"));
            }
        }
        let turn = self.interleave.saturating_mul(self.places());
        if turn > MAX_DEAL {
            let path = if self.order.is_empty() { "cp_size" } else { "order" };
            return Err(bad(path).between(format!("at most {} tokens of a turn", MAX_DEAL), turn));
        }
        Ok(())
    }

    fn check_sections(&self) -> Result<()> {
        let mut ends: BTreeMap<&str, (usize, u64)> = BTreeMap::new();
        for (i, part) in self.parts.iter().enumerate() {
            let head = &self.parts[part.first];
            let end = ends.get(&part.name[..]).map_or(0, |it| it.1);
            let wrong = [
                (part.dtype != head.dtype, "dtype"),
                (part.lanes != head.lanes, "lanes"),
                (part.whole != head.whole, "whole"),
                (part.at != end, "at"),
                (part.encoding.is_some() && part.whole != part.lane_bytes, "encoding"),
            ];
            if let Some((_, field)) = wrong.iter().find(|it| it.0) {
                return Err(bad(&format!("parts[{}].{}", i, field)).between("sections that tile a lane", "others"));
            }
            ends.insert(&part.name, (i, end + part.lane_bytes));
        }
        let ends = self.parts.iter().filter_map(|part| ends.get(&part.name[..]));
        for &(i, end) in ends {
            if end != self.parts[i].whole {
                let mine = format!("{} bytes", end);
                return Err(bad(&format!("parts[{}].whole", i)).between(mine, self.parts[i].whole));
            }
        }
        Ok(())
    }
}

fn turns(order: &[u64]) -> Vec<(u64, u64)> {
    let mut counts: BTreeMap<u64, u64> = BTreeMap::new();
    let mut turns: Vec<(u64, u64)> = Vec::new();
    for rank in order {
        let count = counts.entry(*rank).or_insert(0);
        turns.push((*count, 0));
        *count += 1;
    }
    turns.iter_mut().zip(order).for_each(|(turn, rank)| turn.1 = counts[rank]);
    turns
}

pub(crate) fn ceil(a: u64, b: u64) -> u64 {
    a / b + u64::from(a % b > 0)
}

/// What a part is called in the table of names.
fn registered(name: &str) -> &str {
    PARTS.iter().find(|row| row.2.contains(&name)).map_or(name, |row| row.0)
}

/// Whether a sink takes or leaves a part, whatever else it takes of a layer.
pub(crate) fn is_optional(name: &str) -> bool {
    PARTS.iter().any(|row| row.0 == registered(name) && row.1)
}
