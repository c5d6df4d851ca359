//! A testee of the conformance suite on top of the crate kvproto, role both, level L2 (testee.md): each line of stdin
//! is a question in JSON, and each line of stdout its answer.
//!
//! ```text
//! rustc --edition 2021 -O --crate-type rlib --crate-name kvproto kvproto/lib.rs
//! rustc --edition 2021 -O --extern kvproto=libkvproto.rlib -o testee testee.rs && kvproto-conformance run -- ./testee
//! ```

use kvproto::json::{from_hex, from_json, hex, quote, to_json, Json};
use kvproto::messages::{self, Columns, Grants};
use kvproto::*;
use std::io::{BufRead, Write};

const HELLO: &str = concat!(
    r#""driver": 1, "name": "crate kvproto", "version": "1", "language": "rust", "role": "both", "level": "L2", "#,
    r#""extensions": ["catalogue", "cold", "deals", "epochs", "inline", "intent", "json", "pull", "sections", "spread", "staged", "storage", "streams", "verify"]"#,
);

fn main() -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    for line in std::io::stdin().lock().lines() {
        let question = Json::parse(&line?).unwrap_or(Json::Null);
        if question.get("op").and_then(Json::text) == Some("stop") {
            break;
        }
        let seq = if let Some(Json::Number(seq)) = question.get("seq") { seq } else { "null" };
        let answer = answer(&question).unwrap_or_else(|| "\"unsupported\": true".to_string());
        writeln!(out, "{{\"seq\": {seq}, {answer}}}")?;
        out.flush()?;
    }
    Ok(())
}

/// The entries of an answer; nothing where the question is not one that is known.
pub fn answer(question: &Json) -> Option<String> {
    let layout = |key: &str, message: bool| {
        Layout::named(question.get(key)?.text()?).filter(|layout| (layout.id > 0) == message)
    };
    let fields = |layout| from_json(layout, question.get("fields").unwrap_or(&Json::Null));
    let bytes = |key: &str| from_hex(question.get(key)?.text()?);
    Some(match question.get("op")?.text()? {
        "hello" => format!("\"spec\": \"{MAJOR}.{MINOR}\", {HELLO}"),
        "decode" => frame(&read_frame(&bytes("frame")?)),
        "encode" => {
            let written = fields(layout("message", true)?).and_then(|record| write_frame(&record));
            told(written, |frame| format!("\"frame\": \"{}\"", hex(&frame)))
        }
        "decode_struct" => told(read_body(layout("struct", false)?, &bytes("bytes")?), |record| fields_of(&record)),
        "encode_struct" => {
            let written = fields(layout("struct", false)?).and_then(|record| write_body(&record));
            told(written, |bytes| format!("\"bytes\": \"{}\"", hex(&bytes)))
        }
        "decode_stream" => {
            let (mut stream, mut frames) = (Stream::default(), Vec::new());
            for chunk in question.get("chunks")?.list()? {
                stream.feed(&from_hex(chunk.text()?)?, |read| frames.push(format!("{{{}}}", frame(&read))));
            }
            format!("\"frames\": [{}]", frames.join(", "))
        }
        "negotiate" => {
            let agreed = negotiate(&terms(question.get("sink")?)?, &terms(question.get("source")?)?);
            told(agreed, |it| {
                let features = each(&it.features, |feature| Some(feature.0.into()));
                format!("\"version\": \"{}.{}\", \"features\": {features}", it.major, it.minor)
            })
        }
        "plan" => planned(question)?,
        "owner" | "length" | "pages" | "slots" => dealt(question)?,
        "lower" => lowered(question, |program, _| Ok(format!("\"copies\": {}", runs(&program.runs()))))?,
        "stream" => lowered(question, |program, _| Ok(format!("\"stream\": {}", runs(&program.stream()))))?,
        "checksums" => lowered(question, |program, regions| {
            let sums = program.checksums(Side::Source, |region| regions.get(region as usize).map(Vec::as_slice))?;
            let sums: Vec<String> = sums.iter().map(|(group, sum)| format!("\"{group}\": \"{sum}\"")).collect();
            Ok(format!("\"checksums\": {{{}}}", sums.join(", ")))
        })?,
        "late" => late(question)?,
        "inline" => inline(question)?,
        _ => return None,
    })
}

/// What a result is as an answer.
fn told<T>(result: Result<T>, tell: impl FnOnce(T) -> String) -> String {
    result.map_or_else(
        |error| {
            let mut out = format!("\"error\": \"{}\", \"path\": ", error.code);
            quote(&error.path, &mut out);
            out
        },
        tell,
    )
}

fn frame(read: &Result<Record<'_>>) -> String {
    told(read.as_ref().map_err(Clone::clone), |record| {
        format!("\"message\": \"{}\", {}", record.layout().name, fields_of(record))
    })
}

fn fields_of(record: &Record<'_>) -> String {
    let mut out = "\"fields\": ".to_string();
    to_json(record, &mut out);
    out
}

fn uints(json: &Json) -> Option<Vec<u64>> {
    json.list()?.iter().map(Json::uint).collect()
}

fn each<T: Copy>(items: &[T], tell: impl Fn(T) -> Option<u64>) -> String {
    let told = |item: &T| tell(*item).map_or("null".to_string(), |number| format!("\"{number}\""));
    format!("[{}]", items.iter().map(told).collect::<Vec<String>>().join(", "))
}

fn runs(runs: &[Run]) -> String {
    let numbers = |run: &Run| [run.source.0.into(), run.source.1, run.sink.0.into(), run.sink.1, run.bytes];
    let told: Vec<String> = runs.iter().map(|run| each(&numbers(run), Some)).collect();
    format!("[{}]", told.join(", "))
}

/// A message or struct in its JSON form, as a type.
fn typed<T: Body>(json: &Json) -> Result<T> {
    T::from_record(from_json(T::layout(), json)?)
}

fn terms(json: &Json) -> Option<Terms> {
    let versions = |json: &Json| {
        let (major, minors) = json.text()?.split_once('.')?;
        let (lowest, highest) = minors.split_once('-')?;
        Some(Versions { major: major.parse().ok()?, lowest: lowest.parse().ok()?, highest: highest.parse().ok()? })
    };
    let features = |key| -> Option<Vec<Feature>> {
        uints(json.get(key)?)?.into_iter().map(|number| Some(Feature(number.try_into().ok()?))).collect()
    };
    Some(Terms {
        versions: json.get("versions")?.list()?.iter().map(versions).collect::<Option<_>>()?,
        offered: features("offered")?,
        needed: features("needed")?,
    })
}

fn planned(question: &Json) -> Option<String> {
    let names = question.get("features")?.list()?.iter().filter_map(Json::text);
    let features: Vec<Feature> = names.filter_map(Feature::named).collect();
    let (source, sink) = (question.get("source")?, question.get("sink")?);
    let found = Description::from_json(source).and_then(|source| {
        let sink = Description::from_json(sink)?;
        Ok((Plan::new(&source, &sink, &features)?, sink))
    });
    Some(told(found, |(plan, sink)| {
        let route = |it: &Route| {
            let (source, sink, group, digest) = (it.source, it.sink, it.group, hex(&it.digest));
            format!(
                "{{\"source\": \"{source}\", \"sink\": \"{sink}\", \"group\": \"{group}\", \"digest\": \"{digest}\"}}"
            )
        };
        let routes: Vec<String> = plan.routes.iter().map(route).collect();
        let awaits = |rank: u32| format!("\"{rank}\": {}", each(&plan.required(rank), |it| Some(it.into())));
        let required: Vec<String> = sink.geometry().ranks.iter().map(|rank| awaits(rank.rank)).collect();
        let (digest, cold) = (hex(&plan.digest), each(&plan.cold, |it| Some(it.into())));
        let (routes, required) = (routes.join(", "), required.join(", "));
        format!("\"plan\": \"{digest}\", \"routes\": [{routes}], \"required\": {{{required}}}, \"cold\": {cold}")
    }))
}

fn dealt(question: &Json) -> Option<String> {
    let tokens = uints(question.get("tokens")?)?;
    let cp_rank = question.get("cp_rank").and_then(Json::uint).unwrap_or(0) as u32;
    let items: Vec<u32> =
        question.get("items").map_or(Some(Vec::new()), uints)?.into_iter().map(|it| it as u32).collect();
    let group = typed::<messages::Group>(question.get("group")?).and_then(|group| Group::new(&group));
    let op = question.get("op")?.text()?;
    Some(told(group.map_err(|error| error.under("group")), |group| match op {
        "owner" => {
            let ranks = each(&tokens, |token| group.owner(token).map(|it| it.0.into()));
            let rows = each(&tokens, |token| group.owner(token).map(|it| it.1));
            format!("\"cp_rank\": {ranks}, \"row\": {rows}")
        }
        "length" => {
            let rows: Vec<String> = tokens.iter().map(|token| each(&group.lengths(*token), Some)).collect();
            format!("\"rows\": [{}]", rows.join(", "))
        }
        "pages" => format!("\"pages\": {}", each(&tokens, |token| Some(group.pages(token)))),
        _ => format!("\"slots\": {}", each(&tokens, |token| group.slot(token, cp_rank, &items))),
    }))
}

/// A SIDE of testee.md.
struct Asked {
    description: Description,
    rank: u32,
    columns: Vec<Columns>,
    windows: Vec<Grants>,
}

/// Nothing where it is not one.
fn asked(json: &Json) -> Option<Result<Asked>> {
    let (columns, windows) = (json.get("columns")?.list()?, json.get("windows")?.list()?);
    let (rank, geometry) = (json.get("rank")?.uint()? as u32, json.get("geometry")?);
    Some(Description::from_json(geometry).and_then(|description| {
        let columns = columns.iter().map(typed).collect::<Result<_>>()?;
        Ok(Asked { description, rank, columns, windows: windows.iter().map(typed).collect::<Result<_>>()? })
    }))
}

/// What is told of a copy program, and of a source's memory, in which byte o of region r is 7 o + r.
fn lowered(question: &Json, tell: fn(&CopyProgram, &[Vec<u8>]) -> Result<String>) -> Option<String> {
    let (source, sink) = (asked(question.get("source")?)?, asked(question.get("sink")?)?);
    let all = source.and_then(|source| {
        let sink = sink?;
        let plan = Plan::new(&source.description, &sink.description, &[])?;
        let from = RankLayout::new(&source.description, source.rank, source.columns)?;
        let to = RankLayout::new(&sink.description, sink.rank, sink.columns)?;
        let program = CopyProgram::new(&plan, (&from, &source.windows), (&to, &sink.windows))?;
        let runs = program.runs();
        let bytes = |region: usize| {
            let ends = runs.iter().filter(|run| run.source.0 as usize == region).map(|run| run.source.1 + run.bytes);
            (0..ends.max().unwrap_or(0)).map(move |o| (7 * o + region as u64) as u8)
        };
        let regions = runs.iter().map(|run| run.source.0 as usize + 1).max().unwrap_or(0);
        tell(&program, &(0..regions).map(|region| bytes(region).collect()).collect::<Vec<Vec<u8>>>())
    });
    Some(told(all, |text| text))
}

fn late(question: &Json) -> Option<String> {
    let cp_rank = question.get("cp_rank")?.uint()? as u32;
    let since = uints(question.get("since")?)?.into_iter().max().unwrap_or(0);
    let (group, grant) = (question.get("group")?, question.get("grant")?);
    let served = typed::<messages::Group>(group).and_then(|group| {
        let (group, grant) = (Group::new(&group)?, typed::<Grants>(grant)?);
        let window = group.serve(&grant, since, cp_rank).map_err(|error| error.under("grants[0]"))?;
        Ok((grant.first, window))
    });
    Some(told(served, |(asked, window)| {
        let begins = if window.first > asked { format!("\"begins\": \"{}\", ", window.first) } else { String::new() };
        let mut out = begins + "\"window\": ";
        to_json(&window.to_record(), &mut out);
        out
    }))
}

fn inline(question: &Json) -> Option<String> {
    let number = |key: &str| question.get(key)?.uint();
    let (mut stream, mut credit) = (Inline::new(number("length")?), Credit { total: number("total")?, counted: 0 });
    let mut refused = String::new();
    for (i, data) in question.get("data")?.list()?.iter().enumerate() {
        let data = data.list()?;
        let last = data.get(2)?.text()? == "true";
        if let Err(error) = stream.take(&mut credit, data.first()?.uint()?, data.get(1)?.uint()?, last) {
            refused = format!(", \"refused\": [\"{i}\", \"{}\", \"{}\"]", error.code, error.path);
        }
    }
    Some(format!("\"unpacked\": \"{}\", \"counted\": \"{}\"{refused}", stream.unpacked, credit.counted))
}
