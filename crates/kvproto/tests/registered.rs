//! Columns and grants that a peer states: each check of rows 7 and 8 of the table of Registers, and of row 8 of that of
//! Transfers, refuses what it is about, at its place.

use kvproto::messages::{Columns, Geometry, Grants, Group, Handle, LaneSpan, Owns, Part, Rank, Region};
use kvproto::{DType, Description, ItemKind, MemoryKind, RankLayout, Result};

const LENGTH: u64 = 4096;

/// One layer of k, 2 lanes of 8 bytes, in 4 pages of 16 rows of two tokens.
fn description(kind: ItemKind, encoding: Option<String>) -> Description {
    let part = Part { name: "k".into(), dtype: DType::U8, lanes: 2, lane_bytes: 8, encoding, at: None, whole: None };
    #[rustfmt::skip]
    let group = Group {
        id: 3, name: "target".into(), model: 0, kind, rows: 16, tokens_per_row: 2, live_rows: None, cp_size: 1,
        interleave: 1, origin: 0, parts: vec![part], partial: None, order: None, axis: None,
    };
    let owns = Owns { group: 3, layers: vec![0], cp_rank: 0, lanes: vec![LaneSpan { part: 0, lo: 0, hi: 2 }] };
    let ranks = vec![Rank { rank: 5, owns: vec![owns] }];
    Description::new(Geometry { replica: 0, facts: vec![], groups: vec![group], ranks, without: None }).unwrap()
}

fn columns() -> Columns {
    let (region, offset) = (vec![7], vec![LENGTH - 4 * 256]);
    Columns { group: 3, items: 4, region, offset, item_stride: vec![256], row_stride: vec![16], lane_stride: vec![8] }
}

fn regions() -> Vec<Region> {
    let handles = vec![Handle { transport: kvproto::Transport::SHM, data: vec![] }];
    let (kind, boot) = (MemoryKind::HOST, [0; 16]);
    vec![Region { id: 7, base: 0, length: LENGTH, kind, device: None, boot, handles, namespace: None }]
}

fn said<T>(result: Result<T>) -> String {
    result.map_or_else(|error| format!("{} {}", error.code, error.path), |_| "fine".into())
}

#[test]
fn columns_that_a_peer_registered_are_checked_in_order() {
    let description = description(ItemKind::Page, None);
    let changed = |change: fn(&mut Columns)| {
        let mut columns = columns();
        change(&mut columns);
        said(RankLayout::registered(&description, 5, vec![columns], &regions()))
    };
    assert_eq!(said(RankLayout::registered(&description, 5, vec![], &regions())), "BAD_COLUMNS columns");
    assert_eq!(said(RankLayout::registered(&description, 6, vec![columns()], &regions())), "BAD_COLUMNS columns");
    assert_eq!(changed(|_| ()), "fine");
    assert_eq!(changed(|it| it.group = 4), "BAD_COLUMNS columns");
    assert_eq!(changed(|it| it.row_stride.clear()), "BAD_COLUMNS columns[0].row_stride");
    assert_eq!(changed(|it| it.region[0] = 8), "BAD_COLUMNS columns[0].region[0]");
    assert_eq!(changed(|it| it.item_stride[0] = LENGTH + 1), "OUT_OF_REGION columns[0].item_stride[0]");
    assert_eq!(changed(|it| it.lane_stride[0] = 7), "BAD_COLUMNS columns[0].lane_stride[0]");
    assert_eq!(changed(|it| it.row_stride[0] = 15), "BAD_COLUMNS columns[0].row_stride[0]");
    assert_eq!(changed(|it| it.item_stride[0] = 255), "BAD_COLUMNS columns[0].item_stride[0]");
    assert_eq!(changed(|it| it.items = 5), "OUT_OF_REGION columns[0].item_stride[0]");
    assert_eq!(changed(|it| it.offset[0] = LENGTH), "OUT_OF_REGION columns[0].offset[0]");
    assert_eq!(changed(|it| it.offset[0] = u64::MAX), "OUT_OF_REGION columns[0].offset[0]");
    // The stride of an axis of one element may be anything.
    assert_eq!(changed(|it| (it.items, it.item_stride[0]) = (1, 1)), "fine");
}

fn granted(kind: ItemKind, encoding: Option<String>, grant: Grants) -> String {
    let description = description(kind, encoding);
    let layout = RankLayout::registered(&description, 5, vec![columns()], &regions()).unwrap();
    said(layout.check_grants(&[grant]))
}

fn grant(first: u64, count: u64, items: &[u32]) -> Grants {
    let items = Some(items.to_vec());
    Grants { group: 3, first, count, valid: first + count, items, state_after: None, late: None }
}

#[test]
fn grants_of_pages_are_checked_in_order() {
    let page = |grant| granted(ItemKind::Page, None, grant);
    assert_eq!(page(grant(0, 64, &[2, 0])), "fine");
    assert_eq!(page(grant(0, 0, &[])), "fine");
    assert_eq!(page(Grants { group: 4, ..grant(0, 64, &[2, 0]) }), "BAD_GRANT grants[0].group");
    assert_eq!(page(Grants { valid: 1, ..grant(0, 64, &[2, 0]) }), "BAD_GRANT grants[0].valid");
    assert_eq!(page(grant(1, 63, &[2, 0])), "BAD_GRANT grants[0].first");
    assert_eq!(page(grant(0, 65, &[2, 0])), "fine"); // the 33rd row is not complete, and is not moved
    assert_eq!(page(grant(0, 66, &[2, 0])), "BAD_GRANT grants[0].items");
    assert_eq!(page(grant(30, 4, &[2])), "BAD_GRANT grants[0].items");
    assert_eq!(page(grant(0, 64, &[2, 4])), "OUT_OF_REGION grants[0].items");
    assert_eq!(page(grant(0, 64, &[2, 2])), "ITEM_ALIAS grants[0].items");
}

#[test]
fn grants_of_rings_and_whole_items_are_checked() {
    assert_eq!(granted(ItemKind::Ring, None, grant(10, 32, &[3])), "fine");
    assert_eq!(granted(ItemKind::Ring, None, grant(10, 34, &[3])), "BAD_GRANT grants[0].count");
    assert_eq!(granted(ItemKind::Slot, None, grant(11, 32, &[3])), "fine");
    assert_eq!(granted(ItemKind::Slot, None, grant(11, 32, &[])), "BAD_GRANT grants[0].items");
    let tiled = || Some("tiled".into());
    assert_eq!(granted(ItemKind::Page, tiled(), grant(32, 4, &[1])), "fine");
    assert_eq!(granted(ItemKind::Page, tiled(), grant(34, 4, &[1])), "BAD_GRANT grants[0].first");
}
