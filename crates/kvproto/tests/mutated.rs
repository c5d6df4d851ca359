//! Inputs by chance, from a seed: frames, Descriptions and JSON with bytes changed, and windows of any size. Nothing
//! panics (numbers that overflow do, in tests), what is read is written as it was, and what is copied has one checksum.

use kvproto::json::{from_hex, from_json, to_json, Json};
use kvproto::messages::{Columns, Geometry, Grants, Message};
use kvproto::*;
use std::collections::BTreeMap;

const VECTORS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../spec/v1/vectors/");

/// splitmix64.
struct Chance(u64);

impl Chance {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ z >> 31
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end.max(1) as u64) as usize
    }

    /// A number of any size, often about a power of two.
    fn number(&mut self) -> u64 {
        let bits = self.below(64);
        match self.below(4) {
            0 => self.next() >> bits,
            1 => (1 << bits) - 1,
            2 => 1 << bits,
            _ => self.below(9) as u64,
        }
    }

    /// Bytes changed, taken away, put in or cut off.
    fn damage(&mut self, bytes: &mut Vec<u8>) {
        const HEADS: [u8; 10] = [0, 1, 0x7f, 0x80, 0xc0, 0xc7, 0xcf, 0xd4, 0xdf, 0xff];
        for _ in 0..1 + self.below(3) {
            if bytes.is_empty() {
                return;
            }
            let at = self.below(bytes.len());
            match self.below(5) {
                0 => bytes[at] = HEADS[self.below(10)],
                1 => bytes[at] = self.next() as u8,
                2 => drop(bytes.drain(at..(at + 1 + self.below(4)).min(bytes.len()))),
                3 => drop(bytes.splice(at..at, (0..1 + at % 4).map(|i| i as u8))),
                _ => bytes.truncate(at + 1),
            }
        }
    }
}

fn cases(name: &str) -> Vec<Json> {
    let text = std::fs::read_to_string(format!("{VECTORS}{name}")).expect("the vectors of the repository");
    Json::parse(&text).and_then(|file| Some(file.get("cases")?.list()?.to_vec())).expect("vectors in JSON")
}

/// The frames that vectors have read.
fn frames() -> Vec<Vec<u8>> {
    let files = std::fs::read_dir(format!("{VECTORS}codec")).unwrap().map(|it| it.unwrap().file_name());
    let mut names: Vec<String> = files.map(|name| format!("codec/{}", name.to_str().unwrap())).collect();
    names.sort();
    let rows = names.iter().flat_map(|name| cases(name));
    let read = rows.filter(|row| row.get("fields").is_some() && row.get("struct").is_none());
    read.filter_map(|row| from_hex(row.get("bytes")?.text()?)).collect()
}

#[test]
fn mutated_frames_are_refused_or_written_as_they_were() {
    let (frames, mut chance) = (frames(), Chance(1));
    let (mut read, mut refused) = (0, 0);
    for _ in 0..300_000 {
        let mut frame = frames[chance.below(frames.len())].clone();
        chance.damage(&mut frame);
        if frame.len() >= 16 && chance.below(5) > 0 {
            let length = (frame.len() - 16) as u32;
            frame[12..16].copy_from_slice(&length.to_le_bytes());
        }
        match decode(&frame) {
            Err(error) => {
                refused += 1;
                assert!(error.code.name().is_some(), "{error}");
                assert_eq!(read_frame(&frame).unwrap_err(), error);
            }
            Ok(message) => {
                read += 1;
                let written = message.encode().expect("what is read can be written");
                assert_eq!(decode(&written).as_ref(), Ok(&message));
                let record = read_frame(&frame).unwrap();
                assert_eq!(message.to_record(), record);
                let mut text = String::new();
                to_json(&record, &mut text);
                let json = Json::parse(&text).expect("JSON");
                assert_eq!(from_json(record.layout(), &json).as_ref(), Ok(&record));
            }
        }
    }
    assert!(read > 20_000 && refused > 100_000, "{read} read, {refused} refused");
}

#[test]
fn mutated_streams_end_or_go_on() {
    let (frames, mut chance) = (frames(), Chance(2));
    for _ in 0..3_000 {
        let mut bytes: Vec<u8> =
            (0..1 + chance.below(4)).flat_map(|_| frames[chance.below(frames.len())].clone()).collect();
        chance.damage(&mut bytes);
        let (mut whole, mut pieces) = (Vec::new(), Vec::new());
        Stream::default().feed(&bytes, |frame| whole.push(frame.map(|it| format!("{it:?}"))));
        let mut stream = Stream::default();
        for piece in bytes.chunks(1 + chance.below(40)) {
            stream.feed(piece, |frame| pieces.push(frame.map(|it| format!("{it:?}"))));
        }
        assert_eq!(whole, pieces);
    }
}

/// Pairs of Descriptions of vectors of plans.
fn pairs() -> Vec<(Geometry, Geometry)> {
    let rows = ["plan/plan.json", "plan/deals.json", "plan/rows.json"].iter().flat_map(|name| cases(name));
    let read = |json: Option<&Json>| Geometry::from_record(from_json(Geometry::layout(), json?).ok()?).ok();
    rows.filter_map(|row| Some((read(row.get("source"))?, read(row.get("sink"))?))).collect()
}

#[test]
fn mutated_descriptions_are_refused_or_planned() {
    let (pairs, mut chance) = (pairs(), Chance(3));
    let bytes: Vec<(Vec<u8>, Vec<u8>)> =
        pairs.iter().map(|(a, b)| (encode_struct(a).unwrap(), encode_struct(b).unwrap())).collect();
    let (mut planned, mut apart, mut refused) = (0, 0, 0);
    for _ in 0..30_000 {
        let (mut source, sink) = bytes[chance.below(bytes.len())].clone();
        chance.damage(&mut source);
        let (source, sink) = match (Description::decode(&source), Description::decode(&sink)) {
            (Ok(source), Ok(sink)) => (source, sink),
            _ => {
                refused += 1;
                continue;
            }
        };
        for (source, sink) in [(&source, &sink), (&sink, &source)] {
            let features = [[].as_slice(), &[Feature::FEW_SOURCES], &[Feature::SPREAD_ONE, Feature::COLD_DRAFT]];
            match Plan::new(source, sink, features[chance.below(3)]) {
                Ok(plan) => planned += usize::from(!plan.routes.is_empty()),
                Err(_) => apart += 1,
            }
        }
    }
    assert!(planned > 100 && apart > 100 && refused > 1_000, "{planned} planned, {apart} apart, {refused} refused");
}

#[test]
fn numbers_of_any_size_are_refused_or_planned() {
    let (pairs, mut chance) = (pairs(), Chance(4));
    let mut checked = 0;
    for _ in 0..30_000 {
        let (mut source, sink) = pairs[chance.below(pairs.len())].clone();
        let number = chance.number();
        let g = chance.below(source.groups.len());
        let group = &mut source.groups[g];
        let p = chance.below(group.parts.len());
        match chance.below(10) {
            0 => group.rows = number as u32,
            1 => group.tokens_per_row = number as u32,
            2 => group.cp_size = number as u32,
            3 => group.interleave = number as u32,
            4 => group.origin = number,
            5 => group.parts[p].lanes = number as u32,
            6 => group.parts[p].lane_bytes = number as u32,
            7 => group.parts[p].whole = Some(number as u32),
            8 => group.order = Some((0..number % 100).map(|i| i as u32 % 7).collect()),
            _ => source.ranks.iter_mut().flat_map(|it| &mut it.owns).for_each(|it| it.lanes[0].hi = number as u32),
        }
        if let (Ok(source), Ok(sink)) = (Description::new(source), Description::new(sink)) {
            checked += 1;
            let _ = Plan::new(&source, &sink, &[]);
            let _ = Plan::new(&sink, &source, &[]);
            if let Some(group) = source.group(source.geometry().groups[g].id) {
                let (token, rank) = (chance.number(), chance.below(3) as u32);
                let _ = (group.owner(token), group.pages(token), group.slot(token, rank, &[7]));
                let _ = group.items(token, chance.number(), rank);
                let valid = token.saturating_add(chance.number());
                let grant = Grants {
                    group: source.geometry().groups[g].id,
                    first: token,
                    count: valid - token,
                    valid,
                    items: Some(vec![1]),
                    state_after: None,
                    late: Some(true),
                };
                let _ = group.serve(&grant, chance.number(), rank);
            }
        }
    }
    assert!(checked > 1_000, "{checked}");
}

/// A side of a vector of lowering.
struct Asked {
    description: Description,
    rank: u32,
    columns: Vec<Columns>,
    windows: Vec<Grants>,
}

fn asked(json: &Json) -> Asked {
    fn all<T: Body>(json: Option<&Json>) -> Vec<T> {
        let items = json.and_then(Json::list).unwrap();
        items.iter().map(|it| T::from_record(from_json(T::layout(), it).unwrap()).unwrap()).collect()
    }
    Asked {
        description: Description::from_json(json.get("geometry").unwrap()).unwrap(),
        rank: json.get("rank").and_then(Json::uint).unwrap() as u32,
        columns: all(json.get("columns")),
        windows: all(json.get("windows")),
    }
}

#[test]
fn what_is_copied_has_one_checksum() {
    let rows = ["lowering.json", "lowering-pools.json"].iter().flat_map(|name| cases(name));
    let mut bytes = 0;
    for row in rows {
        let (source, sink) = (asked(row.get("source").unwrap()), asked(row.get("sink").unwrap()));
        let plan = Plan::new(&source.description, &sink.description, &[]).unwrap();
        let from = RankLayout::new(&source.description, source.rank, source.columns).unwrap();
        let to = RankLayout::new(&sink.description, sink.rank, sink.columns).unwrap();
        let program = CopyProgram::new(&plan, (&from, &source.windows), (&to, &sink.windows)).unwrap();
        let (runs, mut stream) = (program.runs(), program.stream());
        let (mut memory, mut written) = (BTreeMap::<u32, Vec<u8>>::new(), BTreeMap::<u32, Vec<u8>>::new());
        for run in &runs {
            let (end, place) = ((run.source.1 + run.bytes) as usize, (run.sink.1 + run.bytes) as usize);
            let read = memory.entry(run.source.0).or_default();
            read.extend((read.len()..end).map(|i| (i * 31 % 251) as u8));
            let held = written.entry(run.sink.0).or_default();
            held.resize(held.len().max(place), 0);
        }
        for run in &runs {
            let read = &memory[&run.source.0][run.source.1 as usize..][..run.bytes as usize];
            written.get_mut(&run.sink.0).unwrap()[run.sink.1 as usize..][..run.bytes as usize].copy_from_slice(read);
        }
        let sent = program.checksums(Side::Source, |region| memory.get(&region).map(Vec::as_slice)).unwrap();
        let came = program.checksums(Side::Sink, |region| written.get(&region).map(Vec::as_slice)).unwrap();
        assert_eq!(sent, came);
        let error = program.checksums(Side::Sink, |_| Some(&[])).map(|sums| sums.len());
        assert!(runs.is_empty() || error.unwrap_err().code == ErrorCode::OUT_OF_REGION);
        stream.sort_by_key(|run| run.sink);
        let (a, b) = (runs.iter().map(|run| run.bytes).sum::<u64>(), stream.iter().map(|run| run.bytes).sum::<u64>());
        assert_eq!((a, b), (program.bytes(), program.bytes()));
        bytes += a;
    }
    assert!(bytes > 10_000, "{bytes}");
}

#[test]
fn columns_and_windows_of_any_size_are_refused_or_lowered() {
    let rows: Vec<Json> = ["lowering.json", "lowering-pools.json"].iter().flat_map(|name| cases(name)).collect();
    let mut chance = Chance(5);
    let (mut lowered, mut refused) = (0, 0);
    for _ in 0..6_000 {
        let row = &rows[chance.below(rows.len())];
        let (source, mut sink) = (asked(row.get("source").unwrap()), asked(row.get("sink").unwrap()));
        let number = chance.number();
        let i = chance.below(sink.columns.len());
        let columns = &mut sink.columns[i];
        let k = chance.below(columns.region.len());
        let w = chance.below(sink.windows.len());
        match chance.below(8) {
            0 => columns.offset[k] = number,
            1 => columns.item_stride[k] = number,
            2 => columns.row_stride[k] = number,
            3 => columns.lane_stride[k] = number,
            4 => columns.items = number as u32,
            5 => sink.windows[w].first = number,
            6 => sink.windows[w].count = number,
            _ => sink.windows[w].items = Some(vec![number as u32; chance.below(4)]),
        }
        let plan = Plan::new(&source.description, &sink.description, &[]).unwrap();
        let from = RankLayout::new(&source.description, source.rank, source.columns).unwrap();
        let program = RankLayout::new(&sink.description, sink.rank, sink.columns).and_then(|to| {
            let _ = to.check_grants(&sink.windows);
            CopyProgram::new(&plan, (&from, &source.windows), (&to, &sink.windows))
        });
        match program {
            Ok(program) => {
                lowered += 1;
                let bytes: u64 = program.runs().iter().map(|run| run.bytes).sum();
                assert_eq!(bytes, program.bytes());
            }
            Err(error) => {
                refused += 1;
                assert!(error.path.starts_with("columns") || error.path.starts_with("grants"), "{error}");
            }
        }
    }
    assert!(lowered > 500 && refused > 500, "{lowered} lowered, {refused} refused");
}

#[test]
fn mutated_json_is_refused_or_read() {
    let ticket = r#"{"key": "00112233445566778899aabbccddeeff", "engine": "p\u00e9\ud83d\ude00", "replica": "0", "deadline": 60000, "x_y": [null, true, {"a": -1.5e3}]}"#;
    let mut chance = Chance(6);
    let (mut read, mut refused) = (0, 0);
    for _ in 0..60_000 {
        let mut bytes = ticket.as_bytes().to_vec();
        chance.damage(&mut bytes);
        match String::from_utf8(bytes).map(|text| json::from_text::<messages::Ticket>(&text)) {
            Ok(Ok(ticket)) => {
                read += 1;
                assert_eq!(json::from_text(&json::to_text(&ticket).unwrap()), Ok(ticket));
            }
            _ => refused += 1,
        }
    }
    assert!(read > 500 && refused > 1_000, "{read} read, {refused} refused");
}

#[test]
fn deep_json_is_refused() {
    assert_eq!(Json::parse(&"[".repeat(100_000)), None);
    assert!(Json::parse(&format!("{}{}", "[".repeat(500), "]".repeat(500))).is_some());
}

#[test]
fn secrets_are_not_printed() {
    let ticket = messages::Ticket { key: [0xa7; 16], engine: "prefill".into(), replica: 0, deadline: 1 };
    assert_eq!(format!("{ticket:?}"), "Ticket { key: (secret), engine: \"prefill\", replica: 0, deadline: 1 }");
    let bad = messages::Ticket { engine: String::new(), ..ticket };
    let error = json::to_text(&bad).unwrap_err();
    assert_eq!((error.code, error.path.as_str()), (ErrorCode::OUT_OF_RANGE, "engine"));
    assert_eq!(error.to_string(), "OUT_OF_RANGE at engine: expected 1 to 128, got 0");
}

#[test]
fn any_message_is_found_by_its_type() {
    let ping = messages::Ping { session: 1, request: 2 };
    let frame = encode(&ping).unwrap();
    assert_eq!(decode(&frame), Ok(Message::Ping(ping.clone())));
    assert_eq!(Message::from(ping).encode(), Ok(frame));
}
