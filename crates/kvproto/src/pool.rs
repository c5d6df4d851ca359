//! Where what a rank owns lies in memory (registration.md), and which of it a request names (lowering.md).

use crate::body::Body;
use crate::description::{Description, Group, Share};
use crate::enums::{ErrorCode, ItemKind};
use crate::error::{Error, Result};
use crate::facts::MAX_ITEMS;
use crate::messages::{Columns, Grants, Region};
use alloc::collections::BTreeMap;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

/// One rank of a Description, and the columns of its groups.
#[derive(Clone, Debug)]
pub struct RankLayout<'a> {
    pub(crate) description: &'a Description,
    pub(crate) rank: u64,
    pub(crate) columns: BTreeMap<u64, Columns>,
}

const STRIDES: [&str; 3] = ["item_stride", "row_stride", "lane_stride"];

impl<'a> RankLayout<'a> {
    /// The layout of a rank of this side, whose memory it knows.
    ///
    /// # Errors
    ///
    /// `BAD_COLUMNS` if the columns are not those of the groups that the rank owns, in order, with an entry for each
    /// layer and part; `OUT_OF_REGION` if an address would have more than 64 bits.
    pub fn new(description: &'a Description, rank: u32, columns: Vec<Columns>) -> Result<RankLayout<'a>> {
        RankLayout::checked(description, rank, columns, None)
    }

    /// The layout of a peer's rank, by its Register.
    ///
    /// # Errors
    ///
    /// The first check of rows 7 and 8 of the table of Registers that it fails (`KVP-REG-ORDER`).
    pub fn registered(
        description: &'a Description,
        rank: u32,
        columns: Vec<Columns>,
        regions: &[Region],
    ) -> Result<RankLayout<'a>> {
        RankLayout::checked(description, rank, columns, Some(regions))
    }

    fn checked(
        description: &'a Description,
        rank: u32,
        columns: Vec<Columns>,
        regions: Option<&[Region]>,
    ) -> Result<RankLayout<'a>> {
        let lengths: Option<BTreeMap<u32, u64>> =
            regions.map(|regions| regions.iter().map(|region| (region.id, region.length)).collect());
        let owned: Vec<(&Group, &Share)> = description
            .shares(rank.into())
            .iter()
            .filter_map(|share| Some((description.group_of(share.group)?, share)))
            .filter(|(group, _)| group.kind != ItemKind::Handoff)
            .collect();
        if !owned.iter().map(|it| it.0.id).eq(columns.iter().map(|it| it.group.into())) {
            let mine = format!("groups {:?}", owned.iter().map(|it| it.0.id).collect::<Vec<u64>>());
            let yours = format!("groups {:?}", columns.iter().map(|it| it.group).collect::<Vec<u32>>());
            return Err(Error::at(ErrorCode::BAD_COLUMNS, "columns").between(mine, yours));
        }
        for (i, ((group, share), own)) in owned.iter().zip(&columns).enumerate() {
            check_columns(group, share, own, lengths.as_ref())
                .map_err(|error| error.under(&format!("columns[{}]", i)))?;
        }
        let columns = columns.into_iter().map(|it| (it.group.into(), it)).collect();
        Ok(RankLayout { description, rank: rank.into(), columns })
    }

    pub(crate) fn share(&self, group: u64) -> Option<&'a Share> {
        let shares = self.description.shares(self.rank);
        shares.binary_search_by_key(&group, |share| share.group).ok().map(|place| &shares[place])
    }

    /// Checks a sink's grants of this rank's items: row 8 of the table of Transfers without scales and overlaps.
    ///
    /// # Errors
    ///
    /// `BAD_GRANT`, `OUT_OF_REGION` or `ITEM_ALIAS`, at a path below `grants`.
    pub fn check_grants(&self, grants: &[Grants]) -> Result<()> {
        let mut all = 0;
        for (i, grant) in grants.iter().enumerate() {
            all += grant.items.as_ref().map_or(0, Vec::len) as u64;
            let at = |error: Error| error.under(&format!("grants[{}]", i));
            if all > MAX_ITEMS {
                return Err(at(bad("items").between(format!("at most {} items", MAX_ITEMS), all)));
            }
            let (group, share) = self.owned(grant).map_err(at)?;
            check_window(group, share.cp_rank, grant).map_err(at)?;
            self.check_items(group, share, grant).map_err(at)?;
            let mut items = grant.items.clone().unwrap_or_default();
            items.sort_unstable();
            if let Some(pair) = items.windows(2).find(|pair| pair[0] == pair[1]) {
                return Err(at(Error::at(ErrorCode::ITEM_ALIAS, "items").between("each item once", pair[0])));
            }
        }
        Ok(())
    }

    /// The group of a grant, and what the rank owns of it.
    pub(crate) fn owned(&self, grant: &Grants) -> Result<(&'a Group, &'a Share)> {
        grant.to_record().check()?;
        let group = self.description.group_of(grant.group.into());
        group
            .and_then(|group| Some((group, self.share(group.id)?)))
            .ok_or_else(|| bad("group").between("a group that the rank owns", grant.group))
    }

    pub(crate) fn check_items(&self, group: &Group, share: &Share, grant: &Grants) -> Result<()> {
        let (items, need) = (grant.items.as_deref().unwrap_or(&[]), group.items_of(grant, share));
        if items.len() as u64 != need {
            return Err(bad("items").between(format!("{} items", need), items.len()));
        }
        let pool = self.columns.get(&group.id).map_or(0, |columns| columns.items);
        match items.iter().find(|item| **item >= pool) {
            Some(item) => {
                Err(Error::at(ErrorCode::OUT_OF_REGION, "items").between(format!("items below {}", pool), item))
            }
            None => Ok(()),
        }
    }
}

impl Group {
    fn items_of(&self, grant: &Grants, share: &Share) -> u64 {
        self.items(grant.first, grant.count, share.cp_rank as u32)
    }
}

fn bad(path: &str) -> Error {
    Error::at(ErrorCode::BAD_GRANT, path)
}

fn check_window(group: &Group, cp_rank: u64, grant: &Grants) -> Result<()> {
    let (first, count) = (grant.first, grant.count);
    group.check_begin(first, count, cp_rank)?;
    let (begin, end) = group.rows_of(first, count);
    if group.kind == ItemKind::Ring && end - begin > group.rows {
        return Err(bad("count").between(format!("at most {} rows", group.rows), end - begin));
    }
    if group.cp_size > 1 && count > 0 && first < group.origin {
        return Err(bad("first").between(format!("at least {}", group.origin), first));
    }
    Ok(())
}

impl Group {
    /// Refuses a window that begins inside a row, or inside an item that moves whole.
    pub(crate) fn check_begin(&self, first: u64, count: u64, cp_rank: u64) -> Result<()> {
        let rows = self.kind == ItemKind::Page || self.kind == ItemKind::Ring;
        if rows && count > 0 && first % self.step > 0 {
            return Err(bad("first").between(format!("a multiple of {}", self.step), first));
        }
        if self.kind == ItemKind::Page && self.opaque() {
            let (begin, end) = self.rows_of(first, count);
            let (before, past) = (self.rows_below(begin, cp_rank), self.rows_below(end, cp_rank));
            if before < past && before % self.rows > 0 {
                return Err(bad("first").between(format!("where an item of {} rows begins", self.rows), first));
            }
        }
        Ok(())
    }
}

/// The columns of one group: an entry for each layer and part, within its region if `lengths` has those.
fn check_columns(group: &Group, share: &Share, own: &Columns, lengths: Option<&BTreeMap<u32, u64>>) -> Result<()> {
    let bad =
        |path: &str, mine: String, yours: String| Err(Error::at(ErrorCode::BAD_COLUMNS, path).between(mine, yours));
    let number = share.layers.len() * group.parts.len();
    let arrays = [
        ("region", own.region.len()),
        ("offset", own.offset.len()),
        ("item_stride", own.item_stride.len()),
        ("row_stride", own.row_stride.len()),
        ("lane_stride", own.lane_stride.len()),
    ];
    for (name, length) in arrays {
        if length != number {
            return bad(name, format!("{} entries", number), format!("{}", length));
        }
    }
    let length = |region: &u32| lengths.map_or(Some(u64::MAX), |lengths| lengths.get(region).copied());
    let mut within = Vec::new();
    for (k, region) in own.region.iter().enumerate() {
        match length(region) {
            Some(length) => within.push(length),
            None => return bad(&format!("region[{}]", k), "a region of the Register".into(), format!("{}", region)),
        }
    }
    for (k, length) in within.into_iter().enumerate() {
        let part = k % group.parts.len();
        let lanes = share.lanes.iter().filter(|it| it.0 == part).map(|it| it.2 - it.1).sum();
        let strides = [own.item_stride[k], own.row_stride[k], own.lane_stride[k]];
        let counted = strides.into_iter().zip([own.items.into(), group.rows, lanes]).zip(STRIDES);
        let axes =
            counted.filter(|((_, extent), _)| *extent > 1).map(|((stride, extent), name)| (stride, extent, name));
        let entry = Entry { k, offset: own.offset[k], size: group.parts[part].lane_bytes, length };
        entry.check(axes.collect(), lengths.is_some())?;
    }
    Ok(())
}

/// One layer and part of the columns of a group.
struct Entry {
    k: usize,
    offset: u64,
    size: u64,
    length: u64,
}

impl Entry {
    /// Strides from the innermost axis outwards, then the end of the last item; `apart`: neighbours must not overlap.
    fn check(&self, mut axes: Vec<(u64, u64, &str)>, apart: bool) -> Result<()> {
        axes.sort_unstable();
        let at = |name: &str| format!("{}[{}]", name, self.k);
        let out = |name: &str, mine: String, yours: u128| {
            Err(Error::at(ErrorCode::OUT_OF_REGION, &at(name)).between(mine, yours))
        };
        let (mut reach, mut inner, mut last) = (u128::from(self.size), u128::from(self.size), "offset");
        for (stride, extent, name) in axes {
            let stride = u128::from(stride);
            if stride > self.length.into() {
                return out(name, format!("at most {} bytes", self.length), stride);
            }
            if apart && stride < reach {
                let wrong = Error::at(ErrorCode::BAD_COLUMNS, &at(name));
                return Err(wrong.between(format!("at least {} bytes", reach), stride));
            }
            (inner, last) = (reach, name);
            reach += stride * u128::from(extent - 1);
        }
        let offset = u128::from(self.offset);
        if offset + reach > self.length.into() {
            let path = if offset + inner > self.length.into() { "offset" } else { last };
            return out(path, format!("an end of at most {}", self.length), offset + reach);
        }
        Ok(())
    }
}
