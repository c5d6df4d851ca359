//! Every vector of L1 and L2, by the answers of the testee on top of the crate: what is read and written, and of what is
//! refused the code and the path. The vectors lie in the repository, beside the specification.

#[allow(dead_code)]
#[path = "../../../conformance/testees/rust/testee.rs"]
mod testee;

use kvproto::json::Json;
use std::path::{Path, PathBuf};
use std::rc::Rc;

const VECTORS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../spec/v1/vectors");
/// Extensions that the crate does not have.
const LACKED: [&str; 1] = ["conversion"];

/// A question with its answer, which may have more keys if `more` says so.
struct Ask {
    id: String,
    question: Vec<(String, Json)>,
    answer: Json,
    more: bool,
}

fn files(part: &str) -> Vec<PathBuf> {
    let (folder, begin) = part.split_once('/').unwrap_or(("", part));
    let all = std::fs::read_dir(Path::new(VECTORS).join(folder)).expect("the vectors of the repository");
    let mut found: Vec<PathBuf> = all.map(|it| it.unwrap().path()).collect();
    found.retain(|it| it.extension().map_or(false, |end| end == "json"));
    found.retain(|it| it.file_name().unwrap().to_str().unwrap().starts_with(begin));
    found.sort();
    found
}

/// The cases of files whose names begin so, each with its file.
fn cases(part: &str) -> Vec<(Rc<Json>, Json)> {
    let mut cases = Vec::new();
    for path in files(part) {
        let file = Rc::new(Json::parse(&std::fs::read_to_string(path).unwrap()).expect("vectors in JSON"));
        let rows = file.get("cases").and_then(Json::list).unwrap().to_vec();
        let lacked = |row: &Json| {
            let names = ["extensions", "features"].iter().filter_map(|key| row.get(key)?.list()).flatten();
            names.filter_map(Json::text).any(|name| LACKED.contains(&name) || name == "CONVERT")
        };
        cases.extend(rows.into_iter().filter(|row| !lacked(row)).map(|row| (file.clone(), row)));
    }
    cases
}

fn texts(pairs: &[(&str, &str)]) -> Vec<(String, Json)> {
    pairs.iter().map(|(key, text)| (key.to_string(), Json::Text(text.to_string()))).collect()
}

/// Some keys of an object, those that it has.
fn some(row: &Json, keys: &[&str]) -> Vec<(String, Json)> {
    keys.iter().filter_map(|key| Some((key.to_string(), row.get(key)?.clone()))).collect()
}

/// The parts of an object that are named otherwise in a question or answer.
fn renamed(row: &Json, key: &str, name: &str) -> Vec<(String, Json)> {
    row.get(key).map(|it| (name.to_string(), it.clone())).into_iter().collect()
}

fn asked(op: &str, rest: Vec<Vec<(String, Json)>>) -> Vec<(String, Json)> {
    texts(&[("op", op)]).into_iter().chain(rest.into_iter().flatten()).collect()
}

/// Puts the questions, and checks that at least `least` came out as they must.
fn check(least: usize, asks: Vec<Ask>) {
    let mut wrong = Vec::new();
    for ask in &asks {
        let text = testee::answer(&Json::Map(ask.question.clone())).unwrap_or_else(|| "\"unsupported\": true".into());
        let found = Json::parse(&format!("{{{text}}}")).expect("an answer in JSON");
        if !same(&ask.answer, &found, ask.more) {
            wrong.push(format!("{}: {:?} in place of {:?}", ask.id, found, ask.answer));
        }
    }
    assert!(wrong.is_empty(), "{} of {}: {}", wrong.len(), asks.len(), wrong[0]);
    assert!(asks.len() >= least, "only {} questions", asks.len());
}

fn same(expected: &Json, found: &Json, more: bool) -> bool {
    match (expected, found) {
        (Json::Map(a), Json::Map(b)) => {
            (more || a.len() == b.len())
                && a.iter().all(|(key, value)| found.get(key).map_or(false, |it| same(value, it, false)))
        }
        (Json::List(a), Json::List(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(a, b, false)),
        _ => expected == found,
    }
}

fn id(row: &Json) -> String {
    row.get("id").and_then(Json::text).unwrap().to_string()
}

fn ask(row: &Json, question: Vec<(String, Json)>, answer: Vec<(String, Json)>) -> Ask {
    let refused = some(row, &["error", "path"]);
    let answer = Json::Map(if answer.is_empty() { refused } else { answer });
    Ask { id: id(row), question, answer, more: false }
}

#[test]
fn codec() {
    let mut asks = Vec::new();
    for (_, row) in cases("codec/") {
        let (read, write, key) = match row.get("struct") {
            Some(_) => ("decode_struct", "encode_struct", "bytes"),
            None => ("decode", "encode", "frame"),
        };
        let (of, bytes) = (some(&row, &["struct"]), renamed(&row, "bytes", key));
        let expected = some(&row, &["message", "fields", "error", "path"]);
        asks.push(ask(&row, asked(read, vec![of.clone(), bytes.clone()]), expected));
        if row.get("fields").is_some() && row.get("canonical") != Some(&Json::Bool(false)) {
            asks.push(ask(&row, asked(write, vec![of, some(&row, &["message", "fields"])]), bytes));
        }
    }
    check(2_945, asks);
}

#[test]
fn json_form() {
    let asks = cases("json.json").into_iter().map(|(_, row)| {
        let (op, key) = if row.get("struct").is_some() { ("encode_struct", "bytes") } else { ("encode", "frame") };
        ask(&row, asked(op, vec![some(&row, &["struct", "message", "fields"])]), renamed(&row, "bytes", key))
    });
    check(1_500, asks.collect());
}

#[test]
fn streams() {
    let asks = cases("streams.json").into_iter();
    let asks =
        asks.map(|(_, row)| ask(&row, asked("decode_stream", vec![some(&row, &["chunks"])]), some(&row, &["frames"])));
    check(78, asks.collect());
}

#[test]
fn negotiation() {
    let asks = cases("negotiation.json").into_iter();
    let asks = asks.map(|(_, row)| {
        ask(&row, asked("negotiate", vec![some(&row, &["sink", "source"])]), some(&row, &["version", "features"]))
    });
    check(26, asks.collect());
}

#[test]
fn deals() {
    let mut asks = Vec::new();
    for (_, row) in cases("dcp.json") {
        let question = row.get("question").unwrap();
        if question.get("op").and_then(Json::text) != Some("merge") {
            let answer = row.get("expected").unwrap().clone();
            asks.push(Ask { id: id(&row), question: entries(question), answer, more: false });
        }
    }
    check(121, asks);
}

fn entries(json: &Json) -> Vec<(String, Json)> {
    match json {
        Json::Map(entries) => entries.clone(),
        _ => panic!("an object"),
    }
}

#[test]
fn plans() {
    let mut asks = Vec::new();
    for (file, row) in cases("plan/") {
        let side = |key: &str| {
            let side = row.get(key).unwrap();
            let named = file.get("geometries").and_then(|all| all.get(side.text()?));
            (key.to_string(), named.unwrap_or(side).clone())
        };
        let question = asked("plan", vec![vec![side("source"), side("sink")], some(&row, &["features"])]);
        let expected = row.get("expected").map_or(Vec::new(), entries);
        asks.push(Ask { more: file.get("geometries").is_some(), ..ask(&row, question, expected) });
    }
    check(600, asks);
}

#[test]
fn lowering() {
    let mut asks = Vec::new();
    for (_, row) in cases("lowering") {
        let of = |op| asked(op, vec![some(&row, &["source", "sink"])]);
        asks.push(ask(&row, of("lower"), renamed(&row, "expected", "copies")));
        asks.push(ask(&row, of("checksums"), renamed(&row, "sums", "checksums")));
        asks.push(ask(&row, of("stream"), renamed(&row, "stream", "stream")));
    }
    check(360, asks);
}

#[test]
fn late_windows() {
    let asks = cases("late.json").into_iter().map(|(_, row)| {
        let question = asked("late", vec![some(&row, &["group", "cp_rank", "since", "grant"])]);
        ask(&row, question, some(&row, &["begins", "window"]))
    });
    check(120, asks.collect());
}

#[test]
fn inline_data() {
    let asks = cases("inline.json").into_iter().map(|(_, row)| {
        let question = asked("inline", vec![some(&row, &["length", "total", "data"])]);
        ask(&row, question, row.get("expected").map_or(Vec::new(), entries))
    });
    check(19, asks.collect());
}
