//! All that engines agree on at L2, in Rust: std alone, made from spec/v1 (model.md, planning.md, lowering.md, dcp.md,
//! negotiation.md). It is a testee of the conformance suite, role both, level L2:
//!
//! ```text
//! rustc --edition 2021 -O -o testee planner.rs && kvproto-conformance run -- ./testee
//! ```
//!
//! codec.rs reads and writes, description.rs knows what a Description may say, deal.rs whose a token is, plan.rs and
//! elect.rs find the routes, lower.rs and late.rs the bytes, and agree.rs the rest.

mod agree;
#[allow(dead_code)] // It is a testee by itself too.
mod codec;
mod deal;
mod description;
mod elect;
mod late;
mod lower;
mod plan;
mod sha256;

use codec::{commas, result, to_hex, uint_from_json, Json, Map};
use description::{ceil, read, Geometry, Group};
use lower::{Moved, Side};
use plan::{digest, plan, Features, Plan};

const HELLO: &str = concat!(
    r#""driver": 1, "name": "planner.rs", "version": "1", "language": "rust", "role": "both", "level": "L2", "#,
    r#""extensions": ["catalogue", "cold", "deals", "epochs", "inline", "intent", "json", "pull", "sections", "spread", "staged", "storage", "streams", "verify"]"#,
);

fn main() -> std::io::Result<()> {
    codec::serve(answer)
}

/// The entries of an answer; nothing where the question is not one that is known.
fn answer(question: &Json) -> Option<String> {
    Some(match question.get("op")?.text()? {
        "hello" => codec::hello(HELLO),
        "plan" => planned(question)?,
        "owner" => dealt(
            question,
            &[
                ("cp_rank", |deal, token| some(deal.owner(token).map(|it| it.0))),
                ("row", |deal, token| some(deal.owner(token).map(|it| it.1))),
            ],
        )?,
        "length" => dealt(question, &[("rows", |deal, token| each(&deal.lengths(token), |row| some(Some(row))))])?,
        "pages" => dealt(question, &[("pages", |deal, token| some(Some(deal.pages(token))))])?,
        "slots" => dealt(question, &[("slots", |deal, token| some(deal.slot(token)))])?,
        "lower" => lowered(question, |moved| format!("\"copies\": {}", runs(&moved.copies())))?,
        "stream" => lowered(question, |moved| format!("\"stream\": {}", runs(&moved.stream())))?,
        "checksums" => lowered(question, |moved| {
            let mut out = "\"checksums\": {".to_string();
            commas(&mut out, moved.checksums().iter(), |out, (group, sum)| {
                out.push_str(&format!("\"{group}\": \"{sum}\""))
            });
            out + "}"
        })?,
        "late" => late::late(question)?,
        "negotiate" => agree::negotiate(question)?,
        "inline" => agree::inline(question)?,
        _ => return codec::answer(question),
    })
}

// ---- plans ----

fn planned(question: &Json) -> Option<String> {
    let names = list(question.get("features")?)?;
    let has = |name| names.iter().any(|it| it.text() == Some(name));
    let features =
        Features { spread_one: has("SPREAD_ONE"), few_sources: has("FEW_SOURCES"), cold_draft: has("COLD_DRAFT") };
    let (source, sink) = (question.get("source")?, question.get("sink")?);
    let found = Geometry::read(source).and_then(|source| {
        let sink = Geometry::read(sink)?;
        Ok((plan(&source, &sink, features)?, sink))
    });
    Some(result(found, |(plan, sink), out| tell(&plan, &sink, out)))
}

fn tell(plan: &Plan, sink: &Geometry, out: &mut String) {
    let mut rows: Vec<_> = plan.routes.values().flatten().copied().collect();
    rows.sort_unstable();
    out.push_str(&format!("\"plan\": \"{}\", \"routes\": [", to_hex(&digest(rows.iter()))));
    commas(out, plan.routes.iter(), |out, ((source, sink, group), rows)| {
        let told = to_hex(&digest(rows.iter()));
        out.push_str(&format!(
            "{{\"source\": \"{source}\", \"sink\": \"{sink}\", \"group\": \"{group}\", \"digest\": \"{told}\"}}"
        ));
    });
    out.push_str("], \"required\": {");
    commas(out, sink.ranks.iter(), |out, rank| {
        let mut sources: Vec<u64> = plan.routes.keys().filter(|key| key.1 == rank.rank).map(|key| key.0).collect();
        sources.dedup();
        out.push_str(&format!("\"{}\": {}", rank.rank, each(&sources, |it| some(Some(it)))));
    });
    out.push_str(&format!("}}, \"cold\": {}", each(&plan.cold, |it| some(Some(it)))));
}

// ---- deals ----

/// A question about the deal of a group.
struct Deal {
    group: Group,
    tokens: Vec<u64>,
    cp_rank: u64,
    items: Vec<u64>,
}

impl Deal {
    fn owner(&self, token: u64) -> Option<(u64, u64)> {
        self.group.owner(token)
    }

    fn lengths(&self, token: u64) -> Vec<u64> {
        (0..self.group.cp_size).map(|rank| self.group.tokens_below(token, rank) / self.group.step).collect()
    }

    fn pages(&self, token: u64) -> u64 {
        ceil(self.lengths(token).into_iter().max().unwrap_or(0), self.group.rows)
    }

    fn slot(&self, token: u64) -> Option<u64> {
        let (_, row) = self.owner(token).filter(|owner| owner.0 == self.cp_rank)?;
        Some(self.items.get((row / self.group.rows) as usize)? * self.group.rows + row % self.group.rows)
    }
}

/// Key of the answer, and what it says of a token.
type Told = (&'static str, fn(&Deal, u64) -> String);

fn dealt(question: &Json, told: &[Told]) -> Option<String> {
    let (layout, record) = match read("Group", question.get("group")?) {
        Ok(read) => read,
        Err(refusal) => return Some(result::<()>(Err(refusal.under("group")), |_, _| ())),
    };
    let cp_rank = question.get("cp_rank").and_then(|it| uint_from_json(it).ok()).unwrap_or(0);
    let items = question.get("items").map_or(Some(Vec::new()), uints)?;
    let group = Group::of(&Map { layout, record: &record });
    let deal = Deal { group, tokens: uints(question.get("tokens")?)?, cp_rank, items };
    let mut out = String::new();
    commas(&mut out, told.iter(), |out, (name, tell)| {
        out.push_str(&format!("\"{name}\": {}", each(&deal.tokens, |token| tell(&deal, token))));
    });
    Some(out)
}

// ---- bytes ----

fn lowered(question: &Json, tell: fn(&Moved) -> String) -> Option<String> {
    let (source, sink) = (Side::read(question.get("source")?)?, Side::read(question.get("sink")?)?);
    let moved = source.and_then(|source| Moved::between(&source, &sink?));
    Some(result(moved, |moved, out| out.push_str(&tell(&moved))))
}

fn runs(runs: &[[u64; 5]]) -> String {
    each(runs, |run| each(&run, |number| some(Some(number))))
}

// ---- JSON ----

fn list(json: &Json) -> Option<&[Json]> {
    match json {
        Json::List(items) => Some(items),
        _ => None,
    }
}

fn uints(json: &Json) -> Option<Vec<u64>> {
    list(json)?.iter().map(|item| uint_from_json(item).ok()).collect()
}

fn each<T: Copy>(items: &[T], tell: impl Fn(T) -> String) -> String {
    let mut out = "[".to_string();
    commas(&mut out, items.iter(), |out, item| out.push_str(&tell(*item)));
    out + "]"
}

fn some(number: Option<u64>) -> String {
    number.map_or("null".to_string(), |number| format!("\"{number}\""))
}
