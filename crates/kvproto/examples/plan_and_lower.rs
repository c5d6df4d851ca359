//! A prefill engine with one rank hands 40 tokens to a decode engine with two: who sends what, and which bytes go where.
//! `cargo run --example plan_and_lower`

use kvproto::messages::{Columns, Fact, Geometry, Grants, Group, LaneSpan, Owns, Part, Rank};
use kvproto::{CopyProgram, DType, Description, FactRule, ItemKind, Plan, RankLayout, Result, Side};

const LAYERS: u32 = 2;
const HEADS: u32 = 8;
const HEAD_BYTES: u32 = 256; // 128 numbers in BF16

/// K and V of all layers in pages of `page` tokens; each of `ranks` ranks owns its share of the heads.
fn describe(ranks: u32, page: u32) -> Result<Description> {
    let part = |name: &str| {
        let (name, encoding, at, whole) = (name.into(), None, None, None);
        Part { name, dtype: DType::BF16, lanes: HEADS, lane_bytes: HEAD_BYTES, encoding, at, whole }
    };
    let (kind, rows, parts) = (ItemKind::Page, page, vec![part("k"), part("v")]);
    #[rustfmt::skip]
    let group = Group {
        id: 0, name: "target".into(), model: 0, kind, rows, tokens_per_row: 1, live_rows: None, cp_size: 1,
        interleave: 1, origin: 0, parts, partial: None, order: None, axis: None,
    };
    let owned = |rank: u32| {
        let heads = HEADS / ranks;
        let lanes = [0, 1].map(|part| LaneSpan { part, lo: rank * heads, hi: (rank + 1) * heads });
        Owns { group: 0, layers: (0..LAYERS).collect(), cp_rank: 0, lanes: lanes.into() }
    };
    let ranks = (0..ranks).map(|rank| Rank { rank, owns: vec![owned(rank)] }).collect();
    let weights = Fact { name: "weights.target".into(), value: "8c22764a".into(), rule: FactRule::Equal };
    Description::new(Geometry { replica: 0, facts: vec![weights], groups: vec![group], ranks, without: None })
}

/// One region a rank, in which each layer has a pool of K and one of V: items of `page` rows of all heads of the rank.
fn columns(ranks: u32, page: u32, items: u32) -> Columns {
    let row = u64::from(HEADS / ranks * HEAD_BYTES);
    let (item, pools) = (row * u64::from(page), LAYERS as usize * 2);
    let offset = (0..pools as u64).map(|pool| pool * item * u64::from(items)).collect();
    let (lane_stride, row_stride, item_stride) =
        (vec![u64::from(HEAD_BYTES); pools], vec![row; pools], vec![item; pools]);
    Columns { group: 0, items, region: vec![0; pools], offset, item_stride, row_stride, lane_stride }
}

fn main() -> Result<()> {
    let (source, sink) = (describe(1, 16)?, describe(2, 64)?);
    let plan = Plan::new(&source, &sink, &[])?; // refuses what does not fit, with code, path, and what each side has
    println!("{} routes; decode rank 1 awaits prefill ranks {:?}", plan.routes.len(), plan.required(1));
    let from = RankLayout::new(&source, 0, vec![columns(1, 16, 10)])?;
    let to = RankLayout::new(&sink, 1, vec![columns(2, 64, 4)])?;
    let window =
        |items| vec![Grants { group: 0, first: 0, count: 40, valid: 40, items, state_after: None, late: None }];
    let (read, written) = (window(Some(vec![7, 3, 5])), window(Some(vec![2])));
    let program = CopyProgram::new(&plan, (&from, &read), (&to, &written))?;
    let (runs, memory) = (program.runs(), vec![1u8; 10 * 16 * 2048 * 4]);
    println!("{} bytes in {} runs, the first {:?}", program.bytes(), runs.len(), runs[0]);
    println!("checksums by group: {:?}", program.checksums(Side::Source, |_| Some(&memory))?);
    Ok(())
}
