//! A Description as Rust values, and what is refused in one: model.md, parts.md, handoff.md.

use crate::codec::{
    from_json, refuse_at, write_body, Json, Key, Kind, Layout, Map, Record, Refusal, Result, Value, STRUCTS,
};
use std::collections::{BTreeMap, BTreeSet};

pub const PAGE: u64 = 1;
pub const SLOT: u64 = 2;
pub const RING: u64 = 3;
pub const HANDOFF: u64 = 4;

#[derive(Debug)]
pub struct Geometry {
    pub replica: u64,
    pub facts: Vec<Fact>,
    pub groups: Vec<Group>,
    pub ranks: Vec<Rank>,
    /// Parts that a sink leaves out on purpose.
    pub without: Vec<String>,
}

#[derive(Debug)]
pub struct Fact {
    pub name: String,
    pub value: String,
    pub rule: u64,
}

#[derive(Debug)]
pub struct Group {
    pub id: u64,
    pub name: String,
    pub model: u64,
    pub kind: u64,
    pub rows: u64,
    pub step: u64,
    pub live_rows: u64,
    pub cp_size: u64,
    pub interleave: u64,
    pub origin: u64,
    /// Empty where none is stated.
    pub order: Vec<u64>,
    pub partial: bool,
    pub axis: String,
    pub parts: Vec<Part>,
}

#[derive(Debug)]
pub struct Part {
    pub name: String,
    pub dtype: u64,
    pub lanes: u64,
    pub lane_bytes: u64,
    pub at: u64,
    pub whole: u64,
    pub encoding: Option<String>,
    /// Index of the first part of this name, which stands for all of its sections.
    pub first: usize,
}

#[derive(Debug)]
pub struct Rank {
    pub rank: u64,
    pub owns: Vec<Share>,
}

#[derive(Debug)]
pub struct Share {
    pub group: u64,
    pub layers: Vec<u64>,
    pub cp_rank: u64,
    /// Part, first lane, lane after the last.
    pub lanes: Vec<(usize, u64, u64)>,
}

// ---- reading ----

/// The struct of this name in the JSON form.
pub fn read(name: &str, json: &Json) -> Result<(&'static Layout, Record)> {
    let layout = STRUCTS.iter().find(|layout| layout.name == name).expect("a struct of the registry");
    Ok((layout, from_json(layout, json)?))
}

pub fn number(map: &Map, field: &str) -> u64 {
    map.number(field).unwrap_or(0)
}

pub fn text(map: &Map, field: &str) -> Option<String> {
    match map.value(field) {
        Some(Value::Text(text)) => Some(text.clone()),
        _ => None,
    }
}

pub fn truth(map: &Map, field: &str) -> bool {
    matches!(map.value(field), Some(Value::Bool(true)))
}

pub fn numbers(map: &Map, field: &str) -> Vec<u64> {
    map.keys(field, None).into_iter().map(|key| if let Key::Number(number) = key { number } else { 0 }).collect()
}

fn texts(map: &Map, field: &str) -> Vec<String> {
    let text = |key| if let Key::Text(text) = key { Some(text.to_string()) } else { None };
    map.keys(field, None).into_iter().filter_map(text).collect()
}

fn maps<'a>(map: &Map<'a>, field: &str) -> Vec<Map<'a>> {
    let kind = map.layout.place(field).map(|place| &map.layout.fields[place].kind);
    match (kind, map.value(field)) {
        (Some(Kind::List(Kind::Struct(layout))), Some(Value::List(values))) => values
            .iter()
            .filter_map(|value| if let Value::Struct(record) = value { Some(Map { layout, record }) } else { None })
            .collect(),
        _ => Vec::new(),
    }
}

impl Geometry {
    /// Reads one, and refuses what is wrong with it.
    pub fn read(json: &Json) -> Result<Geometry> {
        let (layout, record) = read("Geometry", json)?;
        if write_body(layout, &record)?.len() as u64 > MAX_GEOMETRY {
            return refuse_at("BAD_GEOMETRY", "geometry");
        }
        let map = Map { layout, record: &record };
        let fact = |it: &Map| Fact {
            name: text(it, "name").unwrap_or_default(),
            value: text(it, "value").unwrap_or_default(),
            rule: number(it, "rule"),
        };
        let share = |it: &Map| Share {
            group: number(it, "group"),
            layers: numbers(it, "layers"),
            cp_rank: number(it, "cp_rank"),
            lanes: maps(it, "lanes")
                .iter()
                .map(|lane| (number(lane, "part") as usize, number(lane, "lo"), number(lane, "hi")))
                .collect(),
        };
        let geometry = Geometry {
            replica: number(&map, "replica"),
            facts: maps(&map, "facts").iter().map(fact).collect(),
            groups: maps(&map, "groups").iter().map(Group::of).collect(),
            ranks: maps(&map, "ranks")
                .iter()
                .map(|it| Rank { rank: number(it, "rank"), owns: maps(it, "owns").iter().map(share).collect() })
                .collect(),
            without: texts(&map, "without"),
        };
        geometry.sizes()?;
        for (i, group) in geometry.groups.iter().enumerate() {
            group.check().map_err(|refusal| refusal.under(&format!("groups[{}]", i)))?;
        }
        geometry.shares()?;
        Ok(geometry)
    }

    pub fn group(&self, id: u64) -> Option<&Group> {
        self.groups.binary_search_by_key(&id, |group| group.id).ok().map(|place| &self.groups[place])
    }

    pub fn rank(&self, rank: u64) -> Option<&Rank> {
        self.ranks.iter().find(|it| it.rank == rank)
    }

    fn sizes(&self) -> Result<()> {
        let parts: usize = self.groups.iter().map(|group| group.parts.len()).sum();
        let runs: usize = self.groups.iter().map(|group| group.order.len()).sum();
        if parts as u64 > MAX_PARTS || runs as u64 > MAX_RUNS {
            return refuse_at("BAD_GEOMETRY", "groups");
        }
        let claims: Vec<u64> = self.ranks.iter().map(|rank| rank.owns.iter().map(|it| self.claims(it)).sum()).collect();
        let all: u64 = claims.iter().sum();
        let most = claims.iter().max().copied().unwrap_or(0);
        if self.ranks.len() as u64 > MAX_RANKS || all > MAX_CLAIMS || most > MAX_RANK_CLAIMS {
            return refuse_at("BAD_GEOMETRY", "ranks");
        }
        Ok(())
    }

    fn claims(&self, share: &Share) -> u64 {
        let parts = self.group(share.group).map_or(&[][..], |group| &group.parts[..]);
        let spans = share.lanes.iter().map(|&(part, lo, hi)| match parts.get(part) {
            Some(it) if it.whole != it.lane_bytes => hi - lo,
            _ => 1,
        });
        spans.sum::<u64>() * share.layers.len() as u64
    }

    fn shares(&self) -> Result<()> {
        let mut homes = BTreeMap::new();
        for (i, rank) in self.ranks.iter().enumerate() {
            for (j, share) in rank.owns.iter().enumerate() {
                let wrong = self.share(share, &mut homes);
                wrong.map_err(|refusal| refusal.under(&format!("ranks[{}].owns[{}]", i, j)))?;
            }
        }
        Ok(())
    }

    fn share<'a>(&'a self, share: &Share, homes: &mut BTreeMap<(u64, &'a str, u64), u64>) -> Result<()> {
        let refuse = |path: &str| refuse_at("BAD_GEOMETRY", path);
        let group = match self.group(share.group) {
            Some(group) => group,
            None => return refuse("group"),
        };
        if group.kind == HANDOFF && share.layers != [0] {
            return refuse("layers");
        }
        if share.cp_rank >= group.cp_size {
            return refuse("cp_rank");
        }
        for (k, &(part, _, hi)) in share.lanes.iter().enumerate() {
            match group.parts.get(part) {
                None => return refuse(&format!("lanes[{}].part", k)),
                Some(it) if hi > it.lanes => return refuse(&format!("lanes[{}].hi", k)),
                _ => (),
            }
        }
        let mut spans = share.lanes.clone();
        spans.sort_unstable();
        let stated: BTreeSet<usize> = spans.iter().map(|span| span.0).collect();
        let overlap = spans.windows(2).any(|pair| pair[0].0 == pair[1].0 && pair[1].1 < pair[0].2);
        if overlap || stated.len() != group.parts.len() {
            return refuse("lanes");
        }
        for part in &group.parts {
            for layer in &share.layers {
                if *homes.entry((group.model, &part.name[..], *layer)).or_insert(group.id) != group.id {
                    return refuse("layers");
                }
            }
        }
        if homes.len() as u64 > MAX_LAYERS {
            return refuse("layers");
        }
        Ok(())
    }
}

impl Group {
    pub fn of(it: &Map) -> Group {
        let part = |it: &Map| {
            let lane_bytes = number(it, "lane_bytes");
            Part {
                name: text(it, "name").unwrap_or_default(),
                dtype: number(it, "dtype"),
                lanes: number(it, "lanes"),
                lane_bytes,
                at: number(it, "at"),
                whole: it.number("whole").unwrap_or(lane_bytes),
                encoding: text(it, "encoding"),
                first: 0,
            }
        };
        let mut parts: Vec<Part> = maps(it, "parts").iter().map(part).collect();
        for i in 0..parts.len() {
            parts[i].first = parts.iter().position(|other| other.name == parts[i].name).unwrap_or(i);
        }
        let rows = number(it, "rows");
        Group {
            id: number(it, "id"),
            name: text(it, "name").unwrap_or_default(),
            model: number(it, "model"),
            kind: number(it, "kind"),
            rows,
            step: number(it, "tokens_per_row"),
            live_rows: it.number("live_rows").unwrap_or(rows),
            cp_size: number(it, "cp_size"),
            interleave: number(it, "interleave"),
            origin: number(it, "origin"),
            order: numbers(it, "order"),
            partial: truth(it, "partial"),
            axis: text(it, "axis").unwrap_or_else(|| "tokens".to_string()),
            parts,
        }
    }

    /// Whether its items move whole.
    pub fn opaque(&self) -> bool {
        self.parts.iter().any(|part| part.encoding.is_some())
    }

    fn check(&self) -> Result<()> {
        let refuse = |path: &str| refuse_at("BAD_GEOMETRY", path);
        self.sections().map_err(|path| Refusal { code: "BAD_GEOMETRY", path })?;
        if self.kind == HANDOFF {
            let cut = self.parts.iter().any(|part| part.lanes > 1 || part.whole != part.lane_bytes);
            if cut || self.model != 0 || self.rows != 1 || self.step != 1 {
                return refuse("kind");
            }
        }
        if self.partial && self.kind != PAGE && self.kind != RING {
            return refuse("partial");
        }
        let mut called = BTreeMap::new();
        for part in &self.parts {
            if *called.entry(registered(&part.name)).or_insert(&part.name) != &part.name {
                return refuse("parts");
            }
        }
        if self.cp_size > 1 {
            if self.kind != PAGE || self.interleave % self.step != 0 || self.origin % self.step != 0 {
                return refuse("interleave");
            }
        }
        if self.cp_size > 1 && !self.order.is_empty() {
            let stated: BTreeSet<u64> = self.order.iter().copied().collect();
            if stated.len() as u64 != self.cp_size || stated.iter().next_back() != Some(&(self.cp_size - 1)) {
                return refuse("order");
            }
        }
        if self.cp_size > 1 && self.interleave * self.places() > MAX_DEAL {
            return refuse(if self.order.is_empty() { "cp_size" } else { "order" });
        }
        Ok(())
    }

    fn sections(&self) -> std::result::Result<(), String> {
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
                return Err(format!("parts[{}].{}", i, field));
            }
            ends.insert(&part.name, (i, end + part.lane_bytes));
        }
        match self.parts.iter().filter_map(|part| ends.get(&part.name[..])).find(|it| it.1 != self.parts[it.0].whole) {
            Some((i, _)) => Err(format!("parts[{}].whole", i)),
            None => Ok(()),
        }
    }
}

pub fn ceil(a: u64, b: u64) -> u64 {
    a / b + u64::from(a % b > 0)
}

// ---- parts.md ----

/// What a part is called in the table of names.
pub fn registered(name: &str) -> &str {
    REGISTERED.iter().find(|row| row.2.contains(&name)).map_or(name, |row| row.0)
}

/// Whether a sink takes or leaves a part, whatever else it takes of a layer.
pub fn is_optional(name: &str) -> bool {
    REGISTERED.iter().any(|row| row.0 == registered(name) && row.1)
}

#[rustfmt::skip]
#[allow(dead_code)] // Limits of Transfers are for whoever holds a session.
mod tables {
    // begin facts. Generated by `python -m tools.specgen` from spec/v1/registry; do not edit.
    pub const MAX_GEOMETRY: u64 = 262144;
    pub const MAX_PARTS: u64 = 4096;
    pub const MAX_RUNS: u64 = 65536;
    pub const MAX_RANKS: u64 = 4096;
    pub const MAX_CLAIMS: u64 = 131072;
    pub const MAX_RANK_CLAIMS: u64 = 8192;
    pub const MAX_LAYERS: u64 = 8192;
    pub const MAX_DEAL: u64 = 1048576;
    pub const MAX_CLASS_PAIRS: u64 = 65536;
    pub const MAX_PIECES: u64 = 262144;
    pub const MAX_ITEMS: u64 = 1048576;
    pub const MAX_SPANS: u64 = 131072;
    /// Name, whether it is optional, what else it is called.
    pub static REGISTERED: &[(&str, bool, &[&str])] = &[
        ("k", false, &["key", "keys", "k_cache", "key_cache", "k_buffer", "self_attn.k"]),
        ("v", false, &["value", "values", "v_cache", "value_cache", "v_buffer", "self_attn.v"]),
        ("k_scale", false, &["key_scale", "k_scales", "k_scale_buffer", "k_sf"]),
        ("v_scale", false, &["value_scale", "v_scales", "v_scale_buffer", "v_sf"]),
        ("cross_k", false, &["encoder_k", "cross_attn.k", "encoder_attn.k"]),
        ("cross_v", false, &["encoder_v", "cross_attn.v", "encoder_attn.v"]),
        ("latent", false, &["kv_c", "ckv", "c_kv", "compressed_kv", "kv_c_and_k_pe", "latent_cache", "kv_buffer"]),
        ("rope", false, &["k_pe", "kpe", "k_rope", "pe_cache"]),
        ("latent_scale", false, &["ckv_scale", "kv_scale_buffer"]),
        ("window_latent", false, &["swa_kv", "swa_latent", "swa_cache", "swa_kv_cache", "window_kv"]),
        ("window_rope", false, &["swa_rope", "swa_k_pe"]),
        ("window_latent_scale", false, &["swa_kv_scale", "swa_latent_scale"]),
        ("compress_state", false, &["kv_score", "kv_score_buffer", "compressor_state", "compress_states"]),
        ("index_compress_state", false, &["indexer_compress_state", "index_kv_score", "indexer_compressor_state"]),
        ("index", false, &["index_k", "indexer_k", "k_index", "index_key"]),
        ("index_scale", false, &["index_k_scale", "indexer_k_scale", "index_k_sf"]),
        ("pending_index", false, &["index_pending", "index_tail", "qsa_pending", "qsa_key_state", "dsa_tail", "compress_tail_k"]),
        ("pending_score", false, &["pending_gate", "kpool_gate", "compress_tail_score", "index_z"]),
        ("pending_position", false, &["qsa_rope_position", "rope_position"]),
        ("conv", false, &["conv_state", "conv_states", "conv_cache", "short_conv"]),
        ("conv_rows", false, &["sconv", "conv_swa", "sconv_state"]),
        ("q_conv", false, &["conv_state_q", "conv_q"]),
        ("k_conv", false, &["conv_state_k", "conv_k"]),
        ("v_conv", false, &["conv_state_v", "conv_v"]),
        ("ple_conv", false, &["ple_conv_state", "ple_short_conv"]),
        ("ssm", false, &["ssm_state", "ssm_states", "temporal", "temporal_state", "recurrent_state", "linear_state", "kv_state"]),
        ("ngram", false, &["ngram_state", "ngram_context", "ple_ngram", "engram_state"]),
        ("embedding", true, &["mm_embedding", "image_embeds", "encoder_output"]),
        ("hidden_rows", true, &["aux_hidden_states", "target_hidden", "target_hidden_states", "pd_hidden"]),
        ("token", false, &["first_token", "output_id", "next_token"]),
        ("logprob", false, &["token_logprob", "first_logprob"]),
        ("hidden", false, &["hidden_state", "hidden_states", "last_hidden"]),
    ];
    // end facts
}
pub use tables::*;
