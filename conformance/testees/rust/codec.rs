//! A strict reader and writer of kvproto in Rust: one file, std alone, made from spec/v1 (framing.md, messages.md, json.md,
//! testee.md). It is a testee of the conformance suite, role codec, level L1, with byte streams and the JSON form:
//!
//! ```text
//! rustc -O -o testee codec.rs && kvproto-conformance run -- ./testee
//! ```
//!
//! The tables at the end are generated; the code above them is yours to take.

pub use facts::{MESSAGES, STRUCTS};
use facts::*;
use std::cmp::Ordering;
use std::collections::BTreeSet;
use std::io::{BufRead, Write};
use std::ops::RangeInclusive;

// ---- refusals ----

/// What is refused: the name of the error, and where, as far as it is known; callers put what is above in front.
#[derive(Debug)]
pub struct Refusal {
    pub code: &'static str,
    pub path: String,
}

pub type Result<T> = std::result::Result<T, Refusal>;

pub fn refuse<T>(code: &'static str) -> Result<T> {
    refuse_at(code, "")
}

pub fn refuse_at<T>(code: &'static str, path: &str) -> Result<T> {
    Err(Refusal { code, path: path.to_string() })
}

pub fn refuse_if<T>(bad: bool, code: &'static str, fine: T) -> Result<T> {
    if bad {
        refuse(code)
    } else {
        Ok(fine)
    }
}

impl Refusal {
    pub fn under(self, step: &str) -> Refusal {
        let dot = if self.path.is_empty() || self.path.starts_with('[') { "" } else { "." };
        Refusal { code: self.code, path: format!("{}{}{}", step, dot, self.path) }
    }

    pub fn index(self, index: usize) -> Refusal {
        self.under(&format!("[{}]", index))
    }
}

// ---- tables and values ----

/// A message, or a struct, of which the id is 0.
pub struct Layout {
    pub name: &'static str,
    pub id: u16,
    pub major: u8,
    pub fields: &'static [Field],
    pub rules: &'static [Rule],
}

impl Layout {
    pub fn place(&self, name: &str) -> Option<usize> {
        self.fields.iter().position(|field| field.name == name)
    }
}

pub struct Field {
    pub id: u16,
    pub name: &'static str,
    pub required: bool,
    pub kind: Kind,
    /// Least and greatest number, length in bytes, or count of elements.
    pub range: RangeInclusive<u64>,
}

pub enum Kind {
    Uint,
    Bool,
    Text,
    Bytes,
    Enum(&'static Enum),
    /// A number array, by the code of its widest element.
    Array(u8),
    List(&'static Kind),
    Struct(&'static Layout),
}

pub struct Enum {
    pub open: bool,
    pub values: &'static [(u64, &'static str)],
}

impl Enum {
    pub fn name(&self, value: u64) -> Option<&'static str> {
        self.values.iter().find(|row| row.0 == value).map(|row| row.1)
    }

    pub fn value(&self, name: &str) -> Option<u64> {
        self.values.iter().find(|row| row.1 == name).map(|row| row.0)
    }
}

pub struct Rule {
    pub holds: Predicate,
    pub error: &'static str,
}

/// A predicate of framing.md, with the fields that it is about.
pub enum Predicate {
    Ascend(&'static str, Option<&'static str>),
    Rise(&'static str, Option<&'static str>),
    Unique(&'static str, Option<&'static str>),
    Subset(&'static str, &'static str),
    Le(&'static str, &'static str),
    Lt(&'static str, &'static str),
    SumLe(&'static str, &'static str, &'static str),
    SumAtMost(&'static str, &'static str, u64),
    SameLength(&'static [&'static str]),
    PresentIff(&'static str, &'static str, &'static str),
    OnlyIf(&'static str, &'static str, &'static str),
}

#[derive(Clone)]
pub enum Value {
    /// An integer, or the value of an enum.
    Uint(u64),
    Bool(bool),
    Text(String),
    Bytes(Vec<u8>),
    Array(Vec<u64>),
    List(Vec<Value>),
    Struct(Record),
}

/// The fields of a map in the order of its layout.
pub type Record = Vec<Option<Value>>;

/// What is most of one kind, in bytes or elements; beyond it is TOO_LARGE.
pub fn limit(kind: &Kind) -> u64 {
    match kind {
        Kind::Text => MAX_STRING,
        Kind::Bytes => MAX_BYTES,
        Kind::Array(_) => MAX_ARRAY,
        Kind::List(_) => MAX_LIST,
        _ => u64::MAX,
    }
}

pub fn in_range(value: u64, range: &RangeInclusive<u64>) -> Result<()> {
    refuse_if(!range.contains(&value), "OUT_OF_RANGE", ())
}

const ALL: RangeInclusive<u64> = 0..=u64::MAX;

// ---- rules of a map ----

pub fn check(layout: &Layout, record: &Record) -> Result<()> {
    for (field, value) in layout.fields.iter().zip(record) {
        if field.required && value.is_none() {
            return refuse_at("MISSING_FIELD", field.name);
        }
    }
    let map = Map { layout, record };
    for rule in layout.rules {
        if let Some(path) = map.broken(&rule.holds) {
            return refuse_at(rule.error, &path);
        }
    }
    Ok(())
}

pub struct Map<'a> {
    pub layout: &'a Layout,
    pub record: &'a Record,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Key<'a> {
    Number(u64),
    Text(&'a str),
    Bytes(&'a [u8]),
}

impl<'a> Map<'a> {
    /// Where a predicate does not hold, if so.
    pub fn broken(&self, predicate: &Predicate) -> Option<String> {
        let at = |field: &str, broken: bool| if broken { Some(field.to_string()) } else { None };
        match *predicate {
            Predicate::Ascend(list, key) => self.first(list, key, |before, it| before >= it),
            Predicate::Rise(list, key) => self.first(list, key, |before, it| before > it),
            Predicate::Unique(list, key) => {
                let mut seen = BTreeSet::new();
                let twice = self.keys(list, key).into_iter().position(|it| !seen.insert(it))?;
                Some(element(list, key, twice))
            }
            Predicate::Subset(list, whole) => {
                self.value(whole)?;
                let whole: BTreeSet<Key> = self.keys(whole, None).into_iter().collect();
                let stranger = self.keys(list, None).into_iter().position(|it| !whole.contains(&it))?;
                Some(element(list, None, stranger))
            }
            Predicate::Le(a, b) => at(b, self.number(a)? > self.number(b)?),
            Predicate::Lt(a, b) => at(b, self.number(a)? >= self.number(b)?),
            Predicate::SumLe(a, b, c) => at(c, self.sum(a, b)? > self.number(c)?.into()),
            Predicate::SumAtMost(a, b, most) => at(b, self.sum(a, b)? > most.into()),
            Predicate::SameLength(arrays) => {
                let mut lengths = arrays.iter().filter_map(|name| match self.value(name)? {
                    Value::Array(numbers) => Some((name, numbers.len())),
                    _ => None,
                });
                let (_, length) = lengths.next()?;
                lengths.find(|it| it.1 != length).map(|it| it.0.to_string())
            }
            Predicate::PresentIff(field, other, name) => {
                at(field, self.is(other, name)? != self.value(field).is_some())
            }
            Predicate::OnlyIf(field, other, name) => at(field, !self.is(other, name)? && self.value(field).is_some()),
        }
    }

    pub fn value(&self, name: &str) -> Option<&'a Value> {
        self.record[self.layout.place(name)?].as_ref()
    }

    pub fn number(&self, name: &str) -> Option<u64> {
        match self.value(name)? {
            Value::Uint(number) => Some(*number),
            _ => None,
        }
    }

    pub fn sum(&self, a: &str, b: &str) -> Option<u128> {
        Some(self.number(a)? as u128 + self.number(b)? as u128)
    }

    /// Whether an enum has the value of this name; nothing where its value is unknown, and so says nothing.
    pub fn is(&self, field: &str, name: &str) -> Option<bool> {
        match (&self.layout.fields[self.layout.place(field)?].kind, self.number(field)) {
            (Kind::Enum(it), Some(number)) => Some(it.name(number)? == name),
            _ => Some(false),
        }
    }

    /// The elements of a list or array, or the named field of each.
    pub fn keys(&self, list: &str, key: Option<&str>) -> Vec<Key<'a>> {
        let kind = self.layout.place(list).map(|place| &self.layout.fields[place].kind);
        let inner = match (kind, key) {
            (Some(Kind::List(Kind::Struct(inner))), Some(key)) => inner.place(key),
            _ => None,
        };
        let of = |value: &'a Value| match value {
            Value::Uint(number) => Some(Key::Number(*number)),
            Value::Text(text) => Some(Key::Text(text)),
            Value::Bytes(bytes) => Some(Key::Bytes(bytes)),
            _ => None,
        };
        match self.value(list) {
            Some(Value::Array(numbers)) => numbers.iter().map(|number| Key::Number(*number)).collect(),
            Some(Value::List(values)) => values
                .iter()
                .filter_map(|value| match (value, inner) {
                    (Value::Struct(record), Some(inner)) => of(record[inner].as_ref()?),
                    _ => of(value),
                })
                .collect(),
            _ => Vec::new(),
        }
    }

    /// The first element that stands wrong after the one before it.
    pub fn first(&self, list: &str, key: Option<&str>, wrong: fn(&Key, &Key) -> bool) -> Option<String> {
        let keys = self.keys(list, key);
        let place = keys.windows(2).position(|pair| wrong(&pair[0], &pair[1]))?;
        Some(element(list, key, place + 1))
    }
}

pub fn element(list: &str, key: Option<&str>, place: usize) -> String {
    let dot = if key.is_some() { "." } else { "" };
    format!("{}[{}]{}{}", list, place, dot, key.unwrap_or(""))
}

// ---- reader ----

#[derive(Clone, Copy, PartialEq)]
pub enum Family {
    Uint,
    Signed,
    Bool,
    Text,
    Bytes,
    Array,
    List,
    Map,
}

/// Of a first byte: its family, how many bytes of number or length follow, and what the byte itself says where none do.
pub fn form(first: u8) -> Option<(Family, usize, u64)> {
    Some(match first {
        0x00..=0x7f => (Family::Uint, 0, first as u64),
        0x80..=0x8f => (Family::Map, 0, (first - 0x80) as u64),
        0x90..=0x9f => (Family::List, 0, (first - 0x90) as u64),
        0xa0..=0xbf => (Family::Text, 0, (first - 0xa0) as u64),
        0xc2..=0xc3 => (Family::Bool, 0, (first - 0xc2) as u64),
        0xc4..=0xc6 => (Family::Bytes, 1 << (first - 0xc4), 0),
        0xc7..=0xc9 => (Family::Array, 1 << (first - 0xc7), 0),
        0xcc..=0xcf => (Family::Uint, 1 << (first - 0xcc), 0),
        0xd0..=0xd3 => (Family::Signed, 1 << (first - 0xd0), 0),
        0xd4..=0xd8 => (Family::Array, 0, 1 << (first - 0xd4)),
        0xd9..=0xdb => (Family::Text, 1 << (first - 0xd9), 0),
        0xdc..=0xdd => (Family::List, 2 << (first - 0xdc), 0),
        0xde..=0xdf => (Family::Map, 2 << (first - 0xde), 0),
        0xe0..=0xff => (Family::Signed, 0, 0),
        0xc0 | 0xc1 | 0xca | 0xcb => return None,
    })
}

/// Whether a number or length needs the bytes that it has.
pub fn shortest(family: Family, width: usize, value: u64) -> bool {
    let least = if width == 1 { 0 } else { 1 << (4 * width) };
    match family {
        _ if width == 0 => true,
        Family::Uint => value >= least.max(0x80),
        Family::Text => value >= least.max(0x20),
        Family::List | Family::Map => value >= if width == 2 { 0x10 } else { 0x1_0000 },
        Family::Array => value >= least && ![1, 2, 4, 8, 16].contains(&value),
        Family::Signed => {
            let number = (value << (64 - 8 * width)) as i64 >> (64 - 8 * width);
            number < if width == 1 { -0x20 } else { -(1 << (4 * width - 1)) }
        }
        _ => value >= least,
    }
}

pub struct Reader<'a> {
    pub data: &'a [u8],
    /// Entries and elements that the body may still have.
    pub values: u64,
}

impl<'a> Reader<'a> {
    pub fn take(&mut self, count: usize) -> Result<&'a [u8]> {
        if count > self.data.len() {
            return refuse("TRUNCATED");
        }
        let (taken, rest) = self.data.split_at(count);
        self.data = rest;
        Ok(taken)
    }

    pub fn room(&self, count: u64) -> Result<()> {
        refuse_if(count > self.data.len() as u64, "TRUNCATED", ())
    }

    /// The family of a value, with its number, or its length in bytes or elements.
    pub fn head(&mut self, wanted: impl Fn(Family) -> bool) -> Result<(Family, u64)> {
        let first = self.take(1)?[0];
        let (family, width, small) = match form(first) {
            Some(form) if wanted(form.0) => form,
            _ => return refuse("BAD_TYPE"),
        };
        let number = self.take(width)?.iter().fold(small, |number, byte| number << 8 | *byte as u64);
        refuse_if(!shortest(family, width, number), "NOT_CANONICAL", (family, number))
    }

    pub fn length(&mut self, family: Family) -> Result<u64> {
        Ok(self.head(|found| found == family)?.1)
    }

    pub fn uint(&mut self) -> Result<u64> {
        let (family, number) = self.head(|found| found == Family::Uint || found == Family::Signed)?;
        refuse_if(family == Family::Signed, "BAD_TYPE", number)
    }

    /// The entries of a map or elements of a list at a depth, all of which the buffer may have.
    pub fn open(&mut self, family: Family, depth: u64) -> Result<u64> {
        refuse_if(depth > MAX_DEPTH, "TOO_DEEP", ())?;
        let count = self.length(family)?;
        refuse_if(count > MAX_LIST || count > self.values, "TOO_LARGE", ())?;
        self.values -= count;
        self.room(if family == Family::Map { 2 * count } else { count })?;
        Ok(count)
    }

    pub fn record(&mut self, layout: &Layout, depth: u64) -> Result<Record> {
        let mut record = vec![None; layout.fields.len()];
        let mut last = 0;
        for _ in 0..self.open(Family::Map, depth)? {
            let id = self.uint()?;
            let place = layout.fields.iter().position(|field| field.id as u64 == id);
            ascends(id, &mut last)
                .and_then(|_| match place {
                    Some(place) => {
                        let field = &layout.fields[place];
                        record[place] = Some(self.value(&field.kind, &field.range, depth)?);
                        Ok(())
                    }
                    None if id < 0x8000 => refuse("UNKNOWN_FIELD"),
                    None => self.skip(depth).or_else(|refusal| refuse(refusal.code)),
                })
                .map_err(|refusal| match place {
                    Some(place) => refusal.under(layout.fields[place].name),
                    None => refusal.under(&format!("#{:04x}", id)),
                })?;
        }
        check(layout, &record)?;
        Ok(record)
    }

    pub fn value(&mut self, kind: &Kind, range: &RangeInclusive<u64>, depth: u64) -> Result<Value> {
        Ok(match kind {
            Kind::Uint => {
                let number = self.uint()?;
                in_range(number, range)?;
                Value::Uint(number)
            }
            Kind::Bool => Value::Bool(self.length(Family::Bool)? == 1),
            Kind::Text => {
                let bytes = self.string(Family::Text, MAX_STRING)?;
                let text = std::str::from_utf8(bytes).or_else(|_| refuse("BAD_TEXT"))?;
                in_range(bytes.len() as u64, range)?;
                Value::Text(text.to_string())
            }
            Kind::Bytes => {
                let bytes = self.string(Family::Bytes, MAX_BYTES)?;
                in_range(bytes.len() as u64, range)?;
                Value::Bytes(bytes.to_vec())
            }
            Kind::Enum(it) => {
                let number = self.uint()?;
                let known = it.name(number).is_some();
                refuse_if(!known && number > 0xffff, "OUT_OF_RANGE", ())?;
                refuse_if(!known && !it.open, "UNKNOWN_ENUM_VALUE", ())?;
                Value::Uint(number)
            }
            Kind::Array(widest) => {
                let (code, bytes) = self.array(1..=*widest)?;
                let numbers: Vec<u64> = bytes.chunks(width(code)).map(|it| element_of(code, it) as u64).collect();
                in_range(numbers.len() as u64, range)?;
                Value::Array(numbers)
            }
            Kind::List(inner) => {
                let count = self.open(Family::List, depth + 1)?;
                in_range(count, range)?;
                let elements = (0..count as usize)
                    .map(|i| self.value(inner, &ALL, depth + 1).map_err(|refusal| refusal.index(i)))
                    .collect::<Result<_>>()?;
                Value::List(elements)
            }
            Kind::Struct(layout) => Value::Struct(self.record(layout, depth + 1)?),
        })
    }

    pub fn string(&mut self, family: Family, limit: u64) -> Result<&'a [u8]> {
        let length = self.length(family)?;
        refuse_if(length > limit, "TOO_LARGE", ())?;
        self.room(length)?;
        self.take(length as usize)
    }

    /// The code of a number array, one of those, and its bytes.
    pub fn array(&mut self, codes: RangeInclusive<u8>) -> Result<(u8, &'a [u8])> {
        let length = self.length(Family::Array)?;
        let code = self.take(1)?[0];
        refuse_if(!codes.contains(&code), "BAD_TYPE", ())?;
        let size = width(code) as u64;
        refuse_if(length % size != 0, "BAD_LENGTH", ())?;
        refuse_if(length / size > MAX_ARRAY, "TOO_LARGE", ())?;
        self.room(length)?;
        let bytes = self.take(length as usize)?;
        let narrow = bytes.chunks(width(code)).all(|it| narrower(code, element_of(code, it)));
        refuse_if(size > 1 && narrow || length == 0 && code != 1, "NOT_CANONICAL", (code, bytes))
    }

    /// Passes over a value inside a map or list of a depth, which keeps all rules that need no table.
    pub fn skip(&mut self, depth: u64) -> Result<()> {
        let first = *self.data.first().map_or_else(|| refuse("TRUNCATED"), Ok)?;
        match form(first).map(|form| form.0) {
            None => return refuse("BAD_TYPE"),
            Some(Family::Text) => {
                let bytes = self.string(Family::Text, MAX_STRING)?;
                std::str::from_utf8(bytes).or_else(|_| refuse("BAD_TEXT"))?;
            }
            Some(Family::Bytes) => drop(self.string(Family::Bytes, MAX_BYTES)?),
            Some(Family::Array) => drop(self.array(1..=8)?),
            Some(Family::List) => {
                for _ in 0..self.open(Family::List, depth + 1)? {
                    self.skip(depth + 1)?;
                }
            }
            Some(Family::Map) => {
                let mut last = 0;
                for _ in 0..self.open(Family::Map, depth + 1)? {
                    ascends(self.uint()?, &mut last)?;
                    self.skip(depth + 1)?;
                }
            }
            Some(_) => drop(self.head(|_| true)?),
        }
        Ok(())
    }
}

/// Whether an id of a field may come after the last one.
pub fn ascends(id: u64, last: &mut u64) -> Result<()> {
    refuse_if(id <= *last, "FIELD_ORDER", ())?;
    *last = id;
    refuse_if(id > 0xffff, "OUT_OF_RANGE", ())
}

/// Bytes of an element of a number array, by its code.
pub fn width(code: u8) -> usize {
    1 << ((code - 1) % 4)
}

pub fn element_of(code: u8, bytes: &[u8]) -> i128 {
    let bits = 8 * bytes.len();
    let number = bytes.iter().rev().fold(0, |number: i128, byte| number << 8 | *byte as i128);
    if code > 4 && number >> (bits - 1) == 1 {
        number - (1 << bits)
    } else {
        number
    }
}

/// Whether half the width of a code would hold a number.
pub fn narrower(code: u8, number: i128) -> bool {
    let bits = 4 * width(code);
    if code > 4 {
        (-(1 << (bits - 1))..1 << (bits - 1)).contains(&number)
    } else {
        number >> bits == 0
    }
}

/// Entries and elements of a body in all; a bare struct may have any number.
pub fn most_values(layout: &Layout) -> u64 {
    if layout.id == 0 {
        u64::MAX
    } else {
        MAX_VALUES
    }
}

/// The body of a message, or a bare struct.
pub fn read_body(layout: &Layout, body: &[u8]) -> Result<Record> {
    refuse_if(body.len() as u64 > MAX_BODY, "TOO_LARGE", ())?;
    let mut reader = Reader { data: body, values: most_values(layout) };
    let record = reader.record(layout, 1)?;
    refuse_if(!reader.data.is_empty(), "TRAILING_BYTES", record)
}

pub fn little(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |number, byte| number << 8 | *byte as u64)
}

/// The layout that an envelope names, of what may be less than a frame or more.
pub fn read_envelope(frame: &[u8]) -> Result<&'static Layout> {
    if frame.iter().zip(MAGIC).any(|(a, b)| *a != b) {
        return refuse_at("BAD_MAGIC", "@magic");
    }
    if frame.len() < HEADER {
        return refuse_at("TRUNCATED", "@length");
    }
    let major = frame[4];
    if major != 0 && major != MAJOR {
        return refuse_at("UNSUPPORTED_VERSION", "@major");
    }
    let id = little(&frame[6..8]);
    let layout = match MESSAGES.iter().find(|layout| layout.id as u64 == id) {
        Some(layout) => *layout,
        None => return refuse_at("UNKNOWN_MESSAGE", "@type"),
    };
    if major != layout.major {
        return refuse_at("UNSUPPORTED_VERSION", "@major");
    }
    if frame[8] != 0 {
        return refuse_at("UNKNOWN_FLAG", "@flags");
    }
    if little(&frame[12..16]) > MAX_BODY {
        return refuse_at("TOO_LARGE", "@length");
    }
    Ok(layout)
}

pub fn read_frame(frame: &[u8]) -> Result<(&'static Layout, Record)> {
    let layout = read_envelope(frame)?;
    let body = &frame[HEADER..];
    match (body.len() as u64).cmp(&little(&frame[12..16])) {
        Ordering::Less => refuse_at("TRUNCATED", "@length"),
        Ordering::Greater => refuse_at("TRAILING_BYTES", "@length"),
        Ordering::Equal => Ok((layout, read_body(layout, body)?)),
    }
}

/// A byte stream: takes pieces, and gives what each frame is.
#[derive(Default)]
pub struct Stream {
    pub held: Vec<u8>,
    /// Bytes still to come of a frame that was too long to hold.
    pub passing: u64,
    pub ended: bool,
}

impl Stream {
    pub fn feed(&mut self, piece: &[u8]) -> Vec<Result<(&'static Layout, Record)>> {
        let passed = self.passing.min(piece.len() as u64);
        self.passing -= passed;
        self.held.extend_from_slice(&piece[passed as usize..]);
        let mut frames = Vec::new();
        let mut at = 0;
        while !self.ended && at < self.held.len() {
            let rest = &self.held[at..];
            let lost = rest.iter().zip(MAGIC).any(|(a, b)| *a != b);
            if !lost && rest.len() < HEADER {
                break;
            }
            let body = if lost { 0 } else { little(&rest[12..16]) };
            let whole = (rest.len() as u64).min(HEADER as u64 + body);
            if body <= MAX_BODY && whole < HEADER as u64 + body && !lost {
                break;
            }
            frames.push(read_frame(&rest[..whole as usize]));
            self.ended = lost;
            self.passing = if lost { 0 } else { HEADER as u64 + body - whole };
            at += whole as usize;
        }
        self.held.drain(..at);
        frames
    }
}

// ---- writer ----

pub struct Writer {
    pub out: Vec<u8>,
    /// Entries and elements so far.
    pub values: u64,
}

impl Writer {
    /// The shortest form of a number or length: what the first byte holds, else that byte and what follows it.
    pub fn head(&mut self, family: Family, number: u64) {
        let (small, low, wide) = match family {
            Family::Uint => (0x7f, 0x00, 0xcc),
            Family::Text => (0x1f, 0xa0, 0xd9),
            Family::List => (0x0f, 0x90, 0xdc - 1),
            Family::Map => (0x0f, 0x80, 0xde - 1),
            Family::Bool => (1, 0xc2, 0),
            Family::Array => (0, 0, 0xc7),
            _ => (0, 0, 0xc4),
        };
        let narrowest = if matches!(family, Family::List | Family::Map) { 1 } else { 0 };
        if family == Family::Array && [1, 2, 4, 8, 16].contains(&number) {
            self.out.push(0xd4 + number.trailing_zeros() as u8);
        } else if low | small > 0 && number <= small as u64 {
            self.out.push(low | number as u8);
        } else {
            let step = (narrowest..3).find(|step| number >> (8 << step) == 0).unwrap_or(3);
            self.out.push(wide + step);
            self.out.extend_from_slice(&number.to_be_bytes()[8 - (1 << step)..]);
        }
    }

    pub fn count(&mut self, family: Family, count: usize) {
        self.values += count as u64;
        self.head(family, count as u64);
    }

    pub fn record(&mut self, layout: &Layout, record: &Record) {
        self.count(Family::Map, record.iter().flatten().count());
        for (field, value) in layout.fields.iter().zip(record) {
            if let Some(value) = value {
                self.head(Family::Uint, field.id.into());
                self.value(&field.kind, value);
            }
        }
    }

    pub fn value(&mut self, kind: &Kind, value: &Value) {
        match (value, kind) {
            (Value::Uint(number), _) => self.head(Family::Uint, *number),
            (Value::Bool(it), _) => self.head(Family::Bool, *it as u64),
            (Value::Text(text), _) => {
                self.head(Family::Text, text.len() as u64);
                self.out.extend_from_slice(text.as_bytes());
            }
            (Value::Bytes(bytes), _) => {
                self.head(Family::Bytes, bytes.len() as u64);
                self.out.extend_from_slice(bytes);
            }
            (Value::Array(numbers), _) => {
                let most = numbers.iter().max().copied().unwrap_or(0);
                let code = (1..4).find(|code| most >> (8 * width(*code)) == 0).unwrap_or(4);
                self.head(Family::Array, (numbers.len() * width(code)) as u64);
                self.out.push(code);
                for number in numbers {
                    self.out.extend_from_slice(&number.to_le_bytes()[..width(code)]);
                }
            }
            (Value::List(values), Kind::List(inner)) => {
                self.count(Family::List, values.len());
                values.iter().for_each(|value| self.value(inner, value));
            }
            (Value::Struct(record), Kind::Struct(layout)) => self.record(layout, record),
            _ => unreachable!("a value has the kind of its field"),
        }
    }
}

/// The body of a message, or a bare struct.
pub fn write_body(layout: &Layout, record: &Record) -> Result<Vec<u8>> {
    let mut writer = Writer { out: Vec::new(), values: 0 };
    writer.record(layout, record);
    let many = writer.values > most_values(layout);
    refuse_if(many || writer.out.len() as u64 > MAX_BODY, "TOO_LARGE", writer.out)
}

pub fn write_frame(layout: &Layout, record: &Record) -> Result<Vec<u8>> {
    let body = write_body(layout, record)?;
    let minor = if layout.major == MAJOR { MINOR } else { 0 };
    let id = layout.id.to_le_bytes();
    let mut frame = [&MAGIC[..], &[layout.major, minor, id[0], id[1], 0, 0, 0, 0]].concat();
    frame.extend_from_slice(&(body.len() as u32).to_le_bytes());
    frame.extend_from_slice(&body);
    Ok(frame)
}

// ---- json ----

pub enum Json {
    Null,
    Bool(bool),
    /// As it was written: doubles have no part in it.
    Number(String),
    Text(String),
    /// A text with half a surrogate pair, which is not UTF-8.
    Broken,
    List(Vec<Json>),
    Map(Vec<(String, Json)>),
}

impl Json {
    pub fn get(&self, key: &str) -> Option<&Json> {
        match self {
            Json::Map(entries) => entries.iter().find(|entry| entry.0 == key).map(|entry| &entry.1),
            _ => None,
        }
    }

    pub fn text(&self) -> Option<&str> {
        match self {
            Json::Text(text) => Some(text),
            _ => None,
        }
    }
}

pub struct Parser<'a> {
    pub data: &'a [u8],
    pub at: usize,
}

impl<'a> Parser<'a> {
    pub const DEEPEST: usize = 512;

    pub fn parse(line: &'a str) -> Option<Json> {
        let mut parser = Parser { data: line.as_bytes(), at: 0 };
        let value = parser.value(0)?;
        parser.blank();
        if parser.at == parser.data.len() {
            Some(value)
        } else {
            None
        }
    }

    pub fn blank(&mut self) {
        while matches!(self.data.get(self.at), Some(b' ' | b'\t' | b'\n' | b'\r')) {
            self.at += 1;
        }
    }

    pub fn eat(&mut self, text: &str) -> Option<()> {
        if self.data[self.at..].starts_with(text.as_bytes()) {
            self.at += text.len();
            Some(())
        } else {
            None
        }
    }

    pub fn value(&mut self, depth: usize) -> Option<Json> {
        self.blank();
        match self.data.get(self.at)? {
            b'n' => self.eat("null").map(|_| Json::Null),
            b't' => self.eat("true").map(|_| Json::Bool(true)),
            b'f' => self.eat("false").map(|_| Json::Bool(false)),
            b'"' => self.string().map(|(text, whole)| if whole { Json::Text(text) } else { Json::Broken }),
            b'[' if depth < Self::DEEPEST => {
                let mut elements = Vec::new();
                self.items(b']', |parser| {
                    elements.push(parser.value(depth + 1)?);
                    Some(())
                })?;
                Some(Json::List(elements))
            }
            b'{' if depth < Self::DEEPEST => {
                let mut entries = Vec::new();
                self.items(b'}', |parser| {
                    let (key, _) = parser.string()?;
                    parser.blank();
                    parser.eat(":")?;
                    entries.push((key, parser.value(depth + 1)?));
                    Some(())
                })?;
                Some(Json::Map(entries))
            }
            b'-' | b'0'..=b'9' => {
                let rest = &self.data[self.at..];
                let end = rest.iter().position(|byte| !b"+-.eE0123456789".contains(byte)).unwrap_or(rest.len());
                self.at += end;
                Some(Json::Number(String::from_utf8(rest[..end].to_vec()).ok()?))
            }
            _ => None,
        }
    }

    pub fn items(&mut self, close: u8, mut item: impl FnMut(&mut Self) -> Option<()>) -> Option<()> {
        self.at += 1;
        self.blank();
        if self.data.get(self.at) == Some(&close) {
            self.at += 1;
            return Some(());
        }
        loop {
            self.blank();
            item(self)?;
            self.blank();
            let next = *self.data.get(self.at)?;
            self.at += 1;
            match next {
                b',' => {}
                _ if next == close => return Some(()),
                _ => return None,
            }
        }
    }

    pub fn unit(&mut self) -> Option<u32> {
        let digits = std::str::from_utf8(self.data.get(self.at..self.at + 4)?).ok()?;
        self.at += 4;
        u32::from_str_radix(digits, 16).ok()
    }

    /// A string, and whether there is no half of a surrogate pair in it, for which it has U+FFFD.
    pub fn string(&mut self) -> Option<(String, bool)> {
        self.eat("\"")?;
        let mut out = Vec::new();
        let mut whole = true;
        loop {
            let byte = *self.data.get(self.at)?;
            self.at += 1;
            if byte == b'"' {
                return Some((String::from_utf8(out).ok()?, whole));
            }
            if byte != b'\\' {
                out.push(byte);
                continue;
            }
            let escape = *self.data.get(self.at)?;
            self.at += 1;
            let code = match escape {
                b'"' | b'\\' | b'/' => escape as u32,
                b'b' => 8,
                b'f' => 12,
                b'n' => 10,
                b'r' => 13,
                b't' => 9,
                b'u' => {
                    let high = self.unit()?;
                    if (0xd800..0xdc00).contains(&high) && self.data[self.at..].starts_with(b"\\u") {
                        let before = self.at;
                        self.at += 2;
                        let low = self.unit()?;
                        if (0xdc00..0xe000).contains(&low) {
                            0x10000 + ((high - 0xd800) << 10) + (low - 0xdc00)
                        } else {
                            self.at = before;
                            high
                        }
                    } else {
                        high
                    }
                }
                _ => return None,
            };
            let it = char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER);
            whole &= it as u32 == code;
            out.extend_from_slice(it.encode_utf8(&mut [0; 4]).as_bytes());
        }
    }
}

/// A map by its JSON form.
pub fn from_json(layout: &Layout, json: &Json) -> Result<Record> {
    let entries = match json {
        Json::Map(entries) => entries,
        _ => return refuse("BAD_TYPE"),
    };
    for (key, _) in entries {
        if !key.starts_with("x_") && !layout.fields.iter().any(|field| field.name == key) {
            return refuse_at("UNKNOWN_FIELD", key);
        }
    }
    let mut record = Vec::new();
    for field in layout.fields {
        let value = json.get(field.name).map(|json| value_from_json(&field.kind, &field.range, json));
        if field.required && value.is_none() {
            return refuse_at("MISSING_FIELD", field.name);
        }
        record.push(value.transpose().map_err(|refusal| refusal.under(field.name))?);
    }
    check(layout, &record)?;
    Ok(record)
}

pub fn value_from_json(kind: &Kind, range: &RangeInclusive<u64>, json: &Json) -> Result<Value> {
    let sized = |length: usize| {
        refuse_if(length as u64 > limit(kind), "TOO_LARGE", ())?;
        in_range(length as u64, range)
    };
    Ok(match (kind, json) {
        (Kind::Uint, _) => {
            let number = uint_from_json(json)?;
            in_range(number, range)?;
            Value::Uint(number)
        }
        (Kind::Bool, Json::Bool(it)) => Value::Bool(*it),
        (Kind::Text, Json::Text(text)) => {
            sized(text.len())?;
            Value::Text(text.clone())
        }
        (Kind::Text, Json::Broken) => return refuse("BAD_TEXT"),
        (Kind::Bytes, Json::Text(text)) => {
            let bytes = from_hex(text).map_or_else(|| refuse("BAD_TYPE"), Ok)?;
            sized(bytes.len())?;
            Value::Bytes(bytes)
        }
        (Kind::Enum(it), Json::Text(name)) => {
            Value::Uint(it.value(name).map_or_else(|| refuse("UNKNOWN_ENUM_VALUE"), Ok)?)
        }
        (Kind::Enum(_), Json::Broken) => return refuse("UNKNOWN_ENUM_VALUE"),
        (Kind::Enum(it), Json::Map(entries)) if entries.len() == 1 && entries[0].0 == "unknown" => {
            let number = uint_from_json(&entries[0].1)?;
            refuse_if(number > 0xffff, "OUT_OF_RANGE", ())?;
            refuse_if(!it.open || it.name(number).is_some(), "UNKNOWN_ENUM_VALUE", Value::Uint(number))?
        }
        (Kind::Array(widest), Json::List(elements)) => {
            let most = u64::MAX >> (64 - 8 * width(*widest));
            let number = |(i, json)| {
                let number = uint_from_json(json).and_then(|number| in_range(number, &(0..=most)).map(|_| number));
                number.map_err(|refusal| refusal.index(i))
            };
            let numbers = elements.iter().enumerate().map(number).collect::<Result<Vec<u64>>>()?;
            sized(numbers.len())?;
            Value::Array(numbers)
        }
        (Kind::List(inner), Json::List(elements)) => {
            let value = |(i, json)| value_from_json(inner, &ALL, json).map_err(|refusal| refusal.index(i));
            let values = elements.iter().enumerate().map(value).collect::<Result<Vec<Value>>>()?;
            sized(values.len())?;
            Value::List(values)
        }
        (Kind::Struct(layout), _) => Value::Struct(from_json(layout, json)?),
        _ => return refuse("BAD_TYPE"),
    })
}

pub fn uint_from_json(json: &Json) -> Result<u64> {
    let (digits, most) = match json {
        Json::Text(digits) => (digits, u64::MAX),
        Json::Number(digits) => (digits, (1 << 53) - 1),
        _ => return refuse("BAD_TYPE"),
    };
    let canonical = digits == "0" || !digits.starts_with('0') && !digits.is_empty();
    refuse_if(!canonical || !digits.bytes().all(|byte| byte.is_ascii_digit()), "BAD_TYPE", ())?;
    match digits.parse::<u64>() {
        Ok(number) if number <= most => Ok(number),
        _ if most < u64::MAX => refuse("BAD_TYPE"),
        _ => refuse("OUT_OF_RANGE"),
    }
}

pub fn from_hex(text: &str) -> Option<Vec<u8>> {
    let digit = |byte: u8| match byte {
        b'0'..=b'9' => Some(byte - b'0'),
        b'a'..=b'f' => Some(byte - b'a' + 10),
        _ => None,
    };
    if text.len() % 2 != 0 {
        return None;
    }
    text.as_bytes().chunks(2).map(|pair| Some(digit(pair[0])? << 4 | digit(pair[1])?)).collect()
}

pub fn to_hex(bytes: &[u8]) -> String {
    let digit = |value: u8| b"0123456789abcdef"[value as usize] as char;
    bytes.iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 15)]).collect()
}

pub fn quote(text: &str, out: &mut String) {
    out.push('"');
    for it in text.chars() {
        match it {
            '"' | '\\' => out.extend(['\\', it]),
            it if it < ' ' => out.push_str(&format!("\\u{:04x}", it as u32)),
            it => out.push(it),
        }
    }
    out.push('"');
}

/// Writes elements between commas.
pub fn commas<T>(out: &mut String, items: impl Iterator<Item = T>, mut item: impl FnMut(&mut String, T)) {
    for (i, it) in items.enumerate() {
        if i > 0 {
            out.push_str(", ");
        }
        item(out, it);
    }
}

pub fn to_json(layout: &Layout, record: &Record, out: &mut String) {
    out.push('{');
    let present = layout.fields.iter().zip(record).filter_map(|(field, value)| Some((field, value.as_ref()?)));
    commas(out, present, |out, (field, value)| {
        quote(field.name, out);
        out.push_str(": ");
        value_to_json(&field.kind, value, out);
    });
    out.push('}');
}

pub fn value_to_json(kind: &Kind, value: &Value, out: &mut String) {
    match (value, kind) {
        (Value::Uint(number), Kind::Enum(it)) => match it.name(*number) {
            Some(name) => quote(name, out),
            None => out.push_str(&format!("{{\"unknown\": \"{}\"}}", number)),
        },
        (Value::Uint(number), _) => out.push_str(&format!("\"{}\"", number)),
        (Value::Bool(it), _) => out.push_str(&it.to_string()),
        (Value::Text(text), _) => quote(text, out),
        (Value::Bytes(bytes), _) => quote(&to_hex(bytes), out),
        (Value::Array(numbers), _) => {
            out.push('[');
            commas(out, numbers.iter(), |out, number| out.push_str(&format!("\"{}\"", number)));
            out.push(']');
        }
        (Value::List(values), Kind::List(inner)) => {
            out.push('[');
            commas(out, values.iter(), |out, value| value_to_json(inner, value, out));
            out.push(']');
        }
        (Value::Struct(record), Kind::Struct(layout)) => to_json(layout, record, out),
        _ => unreachable!("a value has the kind of its field"),
    }
}

// ---- testee ----

/// The entries of an answer; nothing where the question is not one that is known.
pub fn answer(question: &Json) -> Option<String> {
    let text = |key: &str| question.get(key).and_then(Json::text);
    let named = |layouts: &[&'static Layout], key: &str| {
        let name = text(key)?;
        layouts.iter().find(|layout| layout.name == name).copied()
    };
    Some(match text("op")? {
        "hello" => hello(HELLO),
        "decode" => told(read_frame(&from_hex(text("frame")?)?)),
        "encode" => {
            let layout = named(MESSAGES, "message")?;
            let frame = from_json(layout, question.get("fields")?).and_then(|record| write_frame(layout, &record));
            result(frame, |frame, out| out.push_str(&format!("\"frame\": \"{}\"", to_hex(&frame))))
        }
        "decode_struct" => {
            let layout = named(STRUCTS, "struct")?;
            result(read_body(layout, &from_hex(text("bytes")?)?), |record, out| {
                out.push_str("\"fields\": ");
                to_json(layout, &record, out);
            })
        }
        "encode_struct" => {
            let layout = named(STRUCTS, "struct")?;
            let bytes = from_json(layout, question.get("fields")?).and_then(|record| write_body(layout, &record));
            result(bytes, |bytes, out| out.push_str(&format!("\"bytes\": \"{}\"", to_hex(&bytes))))
        }
        "decode_stream" => {
            let chunks = match question.get("chunks")? {
                Json::List(chunks) => chunks,
                _ => return None,
            };
            let mut stream = Stream::default();
            let mut frames = Vec::new();
            for chunk in chunks {
                frames.extend(stream.feed(&from_hex(chunk.text()?)?));
            }
            let mut out = "\"frames\": [".to_string();
            commas(&mut out, frames.into_iter(), |out, frame| out.push_str(&format!("{{{}}}", told(frame))));
            out + "]"
        }
        _ => return None,
    })
}

const HELLO: &str = concat!(
    r#""driver": 1, "name": "codec.rs", "version": "1", "language": "rust", "#,
    r#""role": "codec", "level": "L1", "extensions": ["json", "streams", "epochs", "intent", "inline", "staged", "pull", "catalogue", "storage"]"#,
);

/// The answer to hello of a testee with this codec: the version that it was made for, and what it claims.
pub fn hello(claim: &str) -> String {
    format!("\"spec\": \"{MAJOR}.{MINOR}\", {claim}")
}

pub fn told(frame: Result<(&'static Layout, Record)>) -> String {
    result(frame, |(layout, record), out| {
        out.push_str(&format!("\"message\": \"{}\", \"fields\": ", layout.name));
        to_json(layout, &record, out);
    })
}

pub fn result<T>(result: Result<T>, write: impl FnOnce(T, &mut String)) -> String {
    let mut out = String::new();
    match result {
        Ok(value) => write(value, &mut out),
        Err(refusal) => {
            out.push_str(&format!("\"error\": \"{}\", \"path\": ", refusal.code));
            quote(&refusal.path, &mut out);
        }
    }
    out
}

fn main() -> std::io::Result<()> {
    serve(answer)
}

/// Answers each line, until it is told to stop.
pub fn serve(answer: impl Fn(&Json) -> Option<String>) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    for line in std::io::stdin().lock().lines() {
        let question = Parser::parse(&line?).unwrap_or(Json::Null);
        if question.get("op").and_then(Json::text) == Some("stop") {
            break;
        }
        let seq = match question.get("seq") {
            Some(Json::Number(seq)) => seq,
            _ => "null",
        };
        let answer = answer(&question).unwrap_or_else(|| "\"unsupported\": true".to_string());
        writeln!(out, "{{\"seq\": {}, {}}}", seq, answer)?;
        out.flush()?;
    }
    Ok(())
}

// ---- what the registry says ----

#[rustfmt::skip]
mod facts {
    use super::{Enum, Field, Kind, Layout, Predicate, Rule};
    // begin facts. Generated by `python -m tools.specgen` from spec/v1/registry; do not edit.
    pub(super) const MAGIC: [u8; 4] = *b"KVPW";
    pub(super) const HEADER: usize = 16;
    pub(super) const MAJOR: u8 = 1;
    pub(super) const MINOR: u8 = 0;
    pub(super) const MAX_BODY: u64 = 16777216;
    pub(super) const MAX_DEPTH: u64 = 8;
    pub(super) const MAX_ARRAY: u64 = 4194304;
    pub(super) const MAX_LIST: u64 = 65536;
    pub(super) const MAX_VALUES: u64 = 16384;
    pub(super) const MAX_STRING: u64 = 4096;
    pub(super) const MAX_BYTES: u64 = 8388608;
    static E_ROLE: Enum = Enum { open: true, values: &[(1, "SOURCE"), (2, "SINK")] };
    static E_FACT_RULE: Enum = Enum { open: false, values: &[(1, "EQUAL"), (2, "WARN"), (3, "IGNORE")] };
    static E_ITEM_KIND: Enum = Enum { open: false, values: &[(1, "PAGE"), (2, "SLOT"), (3, "RING"), (4, "HANDOFF")] };
    static E_DTYPE: Enum = Enum { open: true, values: &[(1, "U8"), (2, "I8"), (3, "F16"), (4, "BF16"), (5, "F32"), (6, "F8E4M3"), (7, "F8E5M2"), (8, "I32"), (9, "I64"), (10, "U32"), (11, "F4E2M1"), (12, "F8E8M0")] };
    static E_ACCESS: Enum = Enum { open: false, values: &[(1, "WRITE"), (2, "READ")] };
    static E_MEMORY_KIND: Enum = Enum { open: true, values: &[(1, "HOST"), (2, "CUDA")] };
    static E_TRANSPORT: Enum = Enum { open: true, values: &[(1, "SHM"), (2, "INLINE"), (3, "CUDA"), (4, "NIXL")] };
    static E_REQUEST_STATE: Enum = Enum { open: false, values: &[(1, "PENDING"), (2, "RUNNING"), (3, "READY")] };
    static E_OUTCOME: Enum = Enum { open: false, values: &[(1, "CONTINUE"), (2, "FINISHED")] };
    static E_PROOF: Enum = Enum { open: false, values: &[(1, "PROVEN"), (2, "UNPROVABLE")] };
    static E_CREDIT_KIND: Enum = Enum { open: false, values: &[(1, "STAGING"), (2, "INLINE")] };
    static E_KEY_FORM: Enum = Enum { open: false, values: &[(1, "OWN"), (2, "AHEAD")] };
    static E_LENGTH_RULE: Enum = Enum { open: false, values: &[(1, "PREFIX"), (2, "WINDOW"), (3, "STATE")] };
    static E_TIER: Enum = Enum { open: true, values: &[(1, "DEVICE"), (2, "HOST")] };
    static E_FEATURE: Enum = Enum { open: true, values: &[(1, "VERIFY"), (2, "SPREAD_ONE"), (3, "COLD_DRAFT"), (4, "INTENT"), (5, "PULL"), (6, "STAGED"), (7, "INLINE"), (8, "EPOCHS"), (9, "VERIFY_PAGES"), (10, "FEW_SOURCES"), (11, "SPANS"), (12, "CATALOGUE"), (13, "CONVERT")] };
    static E_ERROR_CODE: Enum = Enum { open: true, values: &[(257, "BAD_MAGIC"), (258, "BAD_LENGTH"), (259, "UNKNOWN_FLAG"), (260, "UNSUPPORTED_VERSION"), (261, "UNKNOWN_MESSAGE"), (262, "TRUNCATED"), (263, "TRAILING_BYTES"), (264, "NOT_CANONICAL"), (265, "BAD_TYPE"), (266, "FIELD_ORDER"), (267, "UNKNOWN_FIELD"), (268, "BAD_TEXT"), (513, "MISSING_FIELD"), (514, "OUT_OF_RANGE"), (515, "UNKNOWN_ENUM_VALUE"), (516, "BAD_GEOMETRY"), (517, "BAD_DIGEST"), (518, "BAD_COLUMNS"), (519, "OUT_OF_REGION"), (520, "BAD_GRANT"), (521, "ITEM_ALIAS"), (522, "NOT_ASCENDING"), (523, "REPEATED"), (524, "FIELD_CONFLICT"), (769, "IDENTITY_MISMATCH"), (770, "DTYPE_MISMATCH"), (771, "LANE_MISMATCH"), (772, "LAYER_MISSING"), (773, "PART_MISSING"), (774, "KIND_MISMATCH"), (775, "ROW_MISMATCH"), (776, "LAYOUT_OPAQUE"), (777, "ROUTE_MISMATCH"), (778, "DESCRIPTION_MISMATCH"), (779, "NO_TRANSPORT"), (780, "CONTENT_MISMATCH"), (781, "COVERAGE"), (782, "NO_VERSION"), (783, "FEATURE_MISSING"), (784, "AXIS_MISMATCH"), (785, "LAYOUT_UNSUPPORTED"), (1025, "UNKNOWN_SESSION"), (1026, "UNEXPECTED_MESSAGE"), (1027, "WRONG_PEER"), (1028, "UNKNOWN_TICKET"), (1029, "TICKET_BOUND"), (1030, "STALE_TRANSFER"), (1031, "ABORTED"), (1032, "SUPERSEDED"), (1033, "DRAINING"), (1034, "PEER_LOST"), (1035, "VERIFY_FAILED"), (1036, "DEADLINE"), (1037, "STATE_POSITION"), (1038, "CREDIT"), (1039, "TICKET_USED"), (1040, "NOT_HELD"), (1041, "NOT_ALLOWED"), (1281, "TOO_LARGE"), (1282, "TOO_DEEP"), (1283, "BUSY"), (1284, "PROMPT_TOO_LONG"), (1537, "INTERNAL"), (1538, "TRANSPORT_FAILED"), (1539, "POOL_MOVED")] };
    static L_VERSION: Layout = Layout {
        name: "Version", id: 0, major: 1,
        fields: &[
            Field { id: 1, name: "major", required: true, kind: Kind::Uint, range: 0..=255 },
            Field { id: 2, name: "minor", required: true, kind: Kind::Uint, range: 0..=255 },
        ],
        rules: &[],
    };
    static L_VERSION_RANGE: Layout = Layout {
        name: "VersionRange", id: 0, major: 1,
        fields: &[
            Field { id: 1, name: "major", required: true, kind: Kind::Uint, range: 0..=255 },
            Field { id: 2, name: "min_minor", required: true, kind: Kind::Uint, range: 0..=255 },
            Field { id: 3, name: "max_minor", required: true, kind: Kind::Uint, range: 0..=255 },
        ],
        rules: &[
            Rule { error: "FIELD_CONFLICT", holds: Predicate::Le("min_minor", "max_minor") },
        ],
    };
    static L_LIMITS: Layout = Layout {
        name: "Limits", id: 0, major: 1,
        fields: &[
            Field { id: 1, name: "max_body", required: true, kind: Kind::Uint, range: 0..=4294967295 },
            Field { id: 2, name: "max_transfers", required: true, kind: Kind::Uint, range: 1..=4294967295 },
        ],
        rules: &[],
    };
    static L_ENDPOINT: Layout = Layout {
        name: "Endpoint", id: 0, major: 1,
        fields: &[
            Field { id: 1, name: "rank", required: true, kind: Kind::Uint, range: 0..=4294967295 },
            Field { id: 2, name: "address", required: true, kind: Kind::Text, range: 0..=4096 },
        ],
        rules: &[],
    };
    static L_GEOMETRY: Layout = Layout {
        name: "Geometry", id: 0, major: 1,
        fields: &[
            Field { id: 1, name: "replica", required: true, kind: Kind::Uint, range: 0..=4294967295 },
            Field { id: 2, name: "facts", required: true, kind: Kind::List(&Kind::Struct(&L_FACT)), range: 0..=65536 },
            Field { id: 3, name: "groups", required: true, kind: Kind::List(&Kind::Struct(&L_GROUP)), range: 1..=65536 },
            Field { id: 4, name: "ranks", required: true, kind: Kind::List(&Kind::Struct(&L_RANK)), range: 1..=65536 },
            Field { id: 5, name: "without", required: false, kind: Kind::List(&Kind::Text), range: 1..=512 },
        ],
        rules: &[
            Rule { error: "BAD_GEOMETRY", holds: Predicate::Ascend("facts", Some("name")) },
            Rule { error: "BAD_GEOMETRY", holds: Predicate::Ascend("groups", Some("id")) },
            Rule { error: "BAD_GEOMETRY", holds: Predicate::Ascend("ranks", Some("rank")) },
        ],
    };
    static L_FACT: Layout = Layout {
        name: "Fact", id: 0, major: 1,
        fields: &[
            Field { id: 1, name: "name", required: true, kind: Kind::Text, range: 1..=128 },
            Field { id: 2, name: "value", required: true, kind: Kind::Text, range: 0..=4096 },
            Field { id: 3, name: "rule", required: true, kind: Kind::Enum(&E_FACT_RULE), range: 0..=65535 },
        ],
        rules: &[],
    };
    static L_GROUP: Layout = Layout {
        name: "Group", id: 0, major: 1,
        fields: &[
            Field { id: 1, name: "id", required: true, kind: Kind::Uint, range: 0..=4294967295 },
            Field { id: 2, name: "name", required: true, kind: Kind::Text, range: 1..=128 },
            Field { id: 3, name: "model", required: true, kind: Kind::Uint, range: 0..=4294967295 },
            Field { id: 4, name: "kind", required: true, kind: Kind::Enum(&E_ITEM_KIND), range: 0..=65535 },
            Field { id: 5, name: "rows", required: true, kind: Kind::Uint, range: 1..=4294967295 },
            Field { id: 6, name: "tokens_per_row", required: true, kind: Kind::Uint, range: 1..=4294967295 },
            Field { id: 7, name: "live_rows", required: false, kind: Kind::Uint, range: 1..=4294967295 },
            Field { id: 8, name: "cp_size", required: true, kind: Kind::Uint, range: 1..=4294967295 },
            Field { id: 9, name: "interleave", required: true, kind: Kind::Uint, range: 1..=4294967295 },
            Field { id: 10, name: "origin", required: true, kind: Kind::Uint, range: 0..=18446744073709551615 },
            Field { id: 11, name: "parts", required: true, kind: Kind::List(&Kind::Struct(&L_PART)), range: 1..=512 },
            Field { id: 12, name: "partial", required: false, kind: Kind::Bool, range: 0..=0 },
            Field { id: 13, name: "order", required: false, kind: Kind::Array(3), range: 1..=4096 },
            Field { id: 14, name: "axis", required: false, kind: Kind::Text, range: 1..=64 },
        ],
        rules: &[
            Rule { error: "BAD_GEOMETRY", holds: Predicate::Le("live_rows", "rows") },
            Rule { error: "BAD_GEOMETRY", holds: Predicate::OnlyIf("live_rows", "kind", "SLOT") },
            Rule { error: "BAD_GEOMETRY", holds: Predicate::OnlyIf("axis", "kind", "PAGE") },
        ],
    };
    static L_PART: Layout = Layout {
        name: "Part", id: 0, major: 1,
        fields: &[
            Field { id: 1, name: "name", required: true, kind: Kind::Text, range: 1..=64 },
            Field { id: 2, name: "dtype", required: true, kind: Kind::Enum(&E_DTYPE), range: 0..=65535 },
            Field { id: 3, name: "lanes", required: true, kind: Kind::Uint, range: 1..=4294967295 },
            Field { id: 4, name: "lane_bytes", required: true, kind: Kind::Uint, range: 1..=4294967295 },
            Field { id: 5, name: "encoding", required: false, kind: Kind::Text, range: 1..=64 },
            Field { id: 6, name: "at", required: false, kind: Kind::Uint, range: 0..=4294967295 },
            Field { id: 7, name: "whole", required: false, kind: Kind::Uint, range: 1..=4294967295 },
        ],
        rules: &[],
    };
    static L_RANK: Layout = Layout {
        name: "Rank", id: 0, major: 1,
        fields: &[
            Field { id: 1, name: "rank", required: true, kind: Kind::Uint, range: 0..=4294967295 },
            Field { id: 2, name: "owns", required: true, kind: Kind::List(&Kind::Struct(&L_OWNS)), range: 0..=65536 },
        ],
        rules: &[
            Rule { error: "BAD_GEOMETRY", holds: Predicate::Ascend("owns", Some("group")) },
        ],
    };
    static L_OWNS: Layout = Layout {
        name: "Owns", id: 0, major: 1,
        fields: &[
            Field { id: 1, name: "group", required: true, kind: Kind::Uint, range: 0..=4294967295 },
            Field { id: 2, name: "layers", required: true, kind: Kind::Array(3), range: 1..=4194304 },
            Field { id: 3, name: "cp_rank", required: true, kind: Kind::Uint, range: 0..=4294967295 },
            Field { id: 4, name: "lanes", required: true, kind: Kind::List(&Kind::Struct(&L_LANE_SPAN)), range: 1..=65536 },
        ],
        rules: &[
            Rule { error: "BAD_GEOMETRY", holds: Predicate::Ascend("layers", None) },
            Rule { error: "BAD_GEOMETRY", holds: Predicate::Rise("lanes", Some("part")) },
        ],
    };
    static L_LANE_SPAN: Layout = Layout {
        name: "LaneSpan", id: 0, major: 1,
        fields: &[
            Field { id: 1, name: "part", required: true, kind: Kind::Uint, range: 0..=4294967295 },
            Field { id: 2, name: "lo", required: true, kind: Kind::Uint, range: 0..=4294967295 },
            Field { id: 3, name: "hi", required: true, kind: Kind::Uint, range: 1..=4294967295 },
        ],
        rules: &[
            Rule { error: "BAD_GEOMETRY", holds: Predicate::Lt("lo", "hi") },
        ],
    };
    static L_REGION: Layout = Layout {
        name: "Region", id: 0, major: 1,
        fields: &[
            Field { id: 1, name: "id", required: true, kind: Kind::Uint, range: 0..=4294967295 },
            Field { id: 2, name: "base", required: true, kind: Kind::Uint, range: 0..=18446744073709551615 },
            Field { id: 3, name: "length", required: true, kind: Kind::Uint, range: 1..=18446744073709551615 },
            Field { id: 4, name: "kind", required: true, kind: Kind::Enum(&E_MEMORY_KIND), range: 0..=65535 },
            Field { id: 5, name: "device", required: false, kind: Kind::Text, range: 1..=128 },
            Field { id: 6, name: "boot", required: true, kind: Kind::Bytes, range: 16..=16 },
            Field { id: 7, name: "handles", required: true, kind: Kind::List(&Kind::Struct(&L_HANDLE)), range: 1..=65536 },
            Field { id: 8, name: "namespace", required: false, kind: Kind::Uint, range: 0..=18446744073709551615 },
        ],
        rules: &[
            Rule { error: "OUT_OF_RANGE", holds: Predicate::SumAtMost("base", "length", 9223372036854775808) },
            Rule { error: "FIELD_CONFLICT", holds: Predicate::PresentIff("device", "kind", "CUDA") },
        ],
    };
    static L_HANDLE: Layout = Layout {
        name: "Handle", id: 0, major: 1,
        fields: &[
            Field { id: 1, name: "transport", required: true, kind: Kind::Enum(&E_TRANSPORT), range: 0..=65535 },
            Field { id: 2, name: "data", required: true, kind: Kind::Bytes, range: 0..=8388608 },
        ],
        rules: &[],
    };
    static L_PROCESS: Layout = Layout {
        name: "Process", id: 0, major: 1,
        fields: &[
            Field { id: 1, name: "boot", required: true, kind: Kind::Bytes, range: 16..=16 },
            Field { id: 2, name: "namespace", required: true, kind: Kind::Uint, range: 0..=18446744073709551615 },
            Field { id: 3, name: "pid", required: true, kind: Kind::Uint, range: 1..=4294967295 },
            Field { id: 4, name: "start", required: true, kind: Kind::Uint, range: 0..=18446744073709551615 },
        ],
        rules: &[],
    };
    static L_COLUMNS: Layout = Layout {
        name: "Columns", id: 0, major: 1,
        fields: &[
            Field { id: 1, name: "group", required: true, kind: Kind::Uint, range: 0..=4294967295 },
            Field { id: 2, name: "items", required: true, kind: Kind::Uint, range: 1..=4294967295 },
            Field { id: 3, name: "region", required: true, kind: Kind::Array(3), range: 1..=4194304 },
            Field { id: 4, name: "offset", required: true, kind: Kind::Array(4), range: 0..=4194304 },
            Field { id: 5, name: "item_stride", required: true, kind: Kind::Array(4), range: 0..=4194304 },
            Field { id: 6, name: "row_stride", required: true, kind: Kind::Array(4), range: 0..=4194304 },
            Field { id: 7, name: "lane_stride", required: true, kind: Kind::Array(4), range: 0..=4194304 },
        ],
        rules: &[
            Rule { error: "BAD_COLUMNS", holds: Predicate::SameLength(&["region", "offset", "item_stride", "row_stride", "lane_stride"]) },
        ],
    };
    static L_ROUTE_REF: Layout = Layout {
        name: "RouteRef", id: 0, major: 1,
        fields: &[
            Field { id: 1, name: "group", required: true, kind: Kind::Uint, range: 0..=4294967295 },
            Field { id: 2, name: "digest", required: true, kind: Kind::Bytes, range: 32..=32 },
        ],
        rules: &[],
    };
    static L_GRANTS: Layout = Layout {
        name: "Grants", id: 0, major: 1,
        fields: &[
            Field { id: 1, name: "group", required: true, kind: Kind::Uint, range: 0..=4294967295 },
            Field { id: 2, name: "first", required: true, kind: Kind::Uint, range: 0..=18446744073709551615 },
            Field { id: 3, name: "count", required: true, kind: Kind::Uint, range: 0..=18446744073709551615 },
            Field { id: 4, name: "valid", required: true, kind: Kind::Uint, range: 0..=18446744073709551615 },
            Field { id: 5, name: "items", required: false, kind: Kind::Array(3), range: 0..=4194304 },
            Field { id: 6, name: "state_after", required: false, kind: Kind::Uint, range: 0..=18446744073709551615 },
            Field { id: 7, name: "late", required: false, kind: Kind::Bool, range: 0..=0 },
        ],
        rules: &[
            Rule { error: "BAD_GRANT", holds: Predicate::SumLe("first", "count", "valid") },
        ],
    };
    static L_BEGIN: Layout = Layout {
        name: "Begin", id: 0, major: 1,
        fields: &[
            Field { id: 1, name: "group", required: true, kind: Kind::Uint, range: 0..=4294967295 },
            Field { id: 2, name: "first", required: true, kind: Kind::Uint, range: 0..=18446744073709551615 },
        ],
        rules: &[],
    };
    static L_HAND_OFF: Layout = Layout {
        name: "HandOff", id: 0, major: 1,
        fields: &[
            Field { id: 1, name: "group", required: true, kind: Kind::Uint, range: 0..=4294967295 },
            Field { id: 2, name: "data", required: true, kind: Kind::Bytes, range: 0..=8388608 },
        ],
        rules: &[],
    };
    static L_CHECKSUM: Layout = Layout {
        name: "Checksum", id: 0, major: 1,
        fields: &[
            Field { id: 1, name: "group", required: true, kind: Kind::Uint, range: 0..=4294967295 },
            Field { id: 2, name: "value", required: true, kind: Kind::Uint, range: 0..=18446744073709551615 },
            Field { id: 3, name: "pages", required: false, kind: Kind::Array(4), range: 0..=4194304 },
        ],
        rules: &[],
    };
    static L_TICKET: Layout = Layout {
        name: "Ticket", id: 0, major: 1,
        fields: &[
            Field { id: 1, name: "key", required: true, kind: Kind::Bytes, range: 16..=16 },
            Field { id: 2, name: "engine", required: true, kind: Kind::Text, range: 1..=128 },
            Field { id: 3, name: "replica", required: true, kind: Kind::Uint, range: 0..=4294967295 },
            Field { id: 4, name: "deadline", required: true, kind: Kind::Uint, range: 1..=18446744073709551615 },
        ],
        rules: &[],
    };
    static L_CONTENT: Layout = Layout {
        name: "Content", id: 0, major: 1,
        fields: &[
            Field { id: 1, name: "tokens", required: true, kind: Kind::Array(3), range: 0..=4194304 },
            Field { id: 2, name: "adapter", required: true, kind: Kind::Text, range: 0..=4096 },
            Field { id: 3, name: "salts", required: true, kind: Kind::List(&Kind::Bytes), range: 0..=65536 },
            Field { id: 4, name: "axes", required: false, kind: Kind::List(&Kind::Struct(&L_AXIS)), range: 0..=65536 },
        ],
        rules: &[
            Rule { error: "NOT_ASCENDING", holds: Predicate::Ascend("axes", Some("name")) },
        ],
    };
    static L_AXIS: Layout = Layout {
        name: "Axis", id: 0, major: 1,
        fields: &[
            Field { id: 1, name: "name", required: true, kind: Kind::Text, range: 1..=64 },
            Field { id: 2, name: "length", required: true, kind: Kind::Uint, range: 0..=18446744073709551615 },
        ],
        rules: &[],
    };
    static L_MANIFEST: Layout = Layout {
        name: "Manifest", id: 0, major: 1,
        fields: &[
            Field { id: 1, name: "id", required: true, kind: Kind::Bytes, range: 32..=32 },
            Field { id: 2, name: "form", required: true, kind: Kind::Enum(&E_KEY_FORM), range: 0..=65535 },
            Field { id: 3, name: "own", required: true, kind: Kind::Bytes, range: 32..=32 },
            Field { id: 4, name: "previous", required: true, kind: Kind::Bytes, range: 32..=32 },
            Field { id: 5, name: "namespace", required: true, kind: Kind::Bytes, range: 32..=32 },
            Field { id: 6, name: "page", required: true, kind: Kind::Uint, range: 1..=4294967295 },
            Field { id: 7, name: "geometry", required: true, kind: Kind::Bytes, range: 32..=32 },
            Field { id: 8, name: "components", required: true, kind: Kind::List(&Kind::Struct(&L_COMPONENT)), range: 1..=512 },
            Field { id: 9, name: "seal", required: false, kind: Kind::Bytes, range: 8..=8 },
        ],
        rules: &[
            Rule { error: "NOT_ASCENDING", holds: Predicate::Ascend("components", Some("group")) },
        ],
    };
    static L_COMPONENT: Layout = Layout {
        name: "Component", id: 0, major: 1,
        fields: &[
            Field { id: 1, name: "group", required: true, kind: Kind::Uint, range: 0..=4294967295 },
            Field { id: 2, name: "form", required: true, kind: Kind::Enum(&E_KEY_FORM), range: 0..=65535 },
            Field { id: 3, name: "rule", required: true, kind: Kind::Enum(&E_LENGTH_RULE), range: 0..=65535 },
            Field { id: 4, name: "reach", required: false, kind: Kind::Uint, range: 1..=4294967295 },
            Field { id: 5, name: "length", required: true, kind: Kind::Uint, range: 1..=18446744073709551615 },
            Field { id: 6, name: "digest", required: true, kind: Kind::Bytes, range: 32..=32 },
        ],
        rules: &[
            Rule { error: "FIELD_CONFLICT", holds: Predicate::PresentIff("reach", "rule", "WINDOW") },
        ],
    };
    static L_KEPT_PAGE: Layout = Layout {
        name: "KeptPage", id: 0, major: 1,
        fields: &[
            Field { id: 1, name: "id", required: true, kind: Kind::Bytes, range: 32..=32 },
            Field { id: 2, name: "tier", required: false, kind: Kind::Enum(&E_TIER), range: 0..=65535 },
        ],
        rules: &[],
    };
    static L_HELLO: Layout = Layout {
        name: "Hello", id: 1, major: 0,
        fields: &[
            Field { id: 1, name: "resume", required: false, kind: Kind::Uint, range: 0..=18446744073709551615 },
            Field { id: 2, name: "request", required: true, kind: Kind::Uint, range: 0..=18446744073709551615 },
            Field { id: 3, name: "versions", required: true, kind: Kind::List(&Kind::Struct(&L_VERSION_RANGE)), range: 1..=65536 },
            Field { id: 4, name: "engine", required: true, kind: Kind::Text, range: 1..=128 },
            Field { id: 5, name: "incarnation", required: true, kind: Kind::Uint, range: 0..=18446744073709551615 },
            Field { id: 6, name: "rank", required: true, kind: Kind::Uint, range: 0..=4294967295 },
            Field { id: 7, name: "replica", required: true, kind: Kind::Uint, range: 0..=4294967295 },
            Field { id: 8, name: "role", required: true, kind: Kind::Enum(&E_ROLE), range: 0..=65535 },
            Field { id: 9, name: "offered", required: true, kind: Kind::List(&Kind::Enum(&E_FEATURE)), range: 0..=65536 },
            Field { id: 10, name: "needed", required: true, kind: Kind::List(&Kind::Enum(&E_FEATURE)), range: 0..=65536 },
            Field { id: 11, name: "limits", required: true, kind: Kind::Struct(&L_LIMITS), range: 0..=0 },
        ],
        rules: &[
            Rule { error: "REPEATED", holds: Predicate::Unique("versions", Some("major")) },
            Rule { error: "NOT_ASCENDING", holds: Predicate::Ascend("offered", None) },
            Rule { error: "NOT_ASCENDING", holds: Predicate::Ascend("needed", None) },
            Rule { error: "FIELD_CONFLICT", holds: Predicate::Subset("needed", "offered") },
        ],
    };
    static L_WELCOME: Layout = Layout {
        name: "Welcome", id: 2, major: 0,
        fields: &[
            Field { id: 1, name: "session", required: true, kind: Kind::Uint, range: 0..=18446744073709551615 },
            Field { id: 2, name: "request", required: true, kind: Kind::Uint, range: 0..=18446744073709551615 },
            Field { id: 3, name: "version", required: true, kind: Kind::Struct(&L_VERSION), range: 0..=0 },
            Field { id: 4, name: "engine", required: true, kind: Kind::Text, range: 1..=128 },
            Field { id: 5, name: "incarnation", required: true, kind: Kind::Uint, range: 0..=18446744073709551615 },
            Field { id: 6, name: "rank", required: true, kind: Kind::Uint, range: 0..=4294967295 },
            Field { id: 7, name: "replica", required: true, kind: Kind::Uint, range: 0..=4294967295 },
            Field { id: 8, name: "features", required: true, kind: Kind::List(&Kind::Enum(&E_FEATURE)), range: 0..=65536 },
            Field { id: 9, name: "limits", required: true, kind: Kind::Struct(&L_LIMITS), range: 0..=0 },
            Field { id: 10, name: "endpoints", required: true, kind: Kind::List(&Kind::Struct(&L_ENDPOINT)), range: 1..=65536 },
        ],
        rules: &[
            Rule { error: "NOT_ASCENDING", holds: Predicate::Ascend("features", None) },
            Rule { error: "NOT_ASCENDING", holds: Predicate::Ascend("endpoints", Some("rank")) },
        ],
    };
    static L_REFUSED: Layout = Layout {
        name: "Refused", id: 3, major: 0,
        fields: &[
            Field { id: 1, name: "session", required: false, kind: Kind::Uint, range: 0..=18446744073709551615 },
            Field { id: 2, name: "request", required: true, kind: Kind::Uint, range: 0..=18446744073709551615 },
            Field { id: 3, name: "code", required: true, kind: Kind::Enum(&E_ERROR_CODE), range: 0..=65535 },
            Field { id: 4, name: "path", required: true, kind: Kind::Text, range: 0..=4096 },
            Field { id: 5, name: "mine", required: true, kind: Kind::Text, range: 0..=4096 },
            Field { id: 6, name: "yours", required: true, kind: Kind::Text, range: 0..=4096 },
            Field { id: 7, name: "advice", required: false, kind: Kind::Text, range: 0..=4096 },
        ],
        rules: &[],
    };
    static L_ERROR: Layout = Layout {
        name: "Error", id: 4, major: 0,
        fields: &[
            Field { id: 1, name: "session", required: false, kind: Kind::Uint, range: 0..=18446744073709551615 },
            Field { id: 2, name: "request", required: false, kind: Kind::Uint, range: 0..=18446744073709551615 },
            Field { id: 3, name: "code", required: true, kind: Kind::Enum(&E_ERROR_CODE), range: 0..=65535 },
            Field { id: 4, name: "path", required: true, kind: Kind::Text, range: 0..=4096 },
            Field { id: 5, name: "mine", required: true, kind: Kind::Text, range: 0..=4096 },
            Field { id: 6, name: "yours", required: true, kind: Kind::Text, range: 0..=4096 },
            Field { id: 7, name: "advice", required: false, kind: Kind::Text, range: 0..=4096 },
            Field { id: 8, name: "about", required: false, kind: Kind::Uint, range: 0..=65535 },
        ],
        rules: &[],
    };
    static L_GOODBYE: Layout = Layout {
        name: "Goodbye", id: 5, major: 0,
        fields: &[
            Field { id: 1, name: "session", required: true, kind: Kind::Uint, range: 0..=18446744073709551615 },
            Field { id: 3, name: "reason", required: true, kind: Kind::Text, range: 0..=4096 },
        ],
        rules: &[],
    };
    static L_PING: Layout = Layout {
        name: "Ping", id: 6, major: 1,
        fields: &[
            Field { id: 1, name: "session", required: true, kind: Kind::Uint, range: 0..=18446744073709551615 },
            Field { id: 2, name: "request", required: true, kind: Kind::Uint, range: 0..=18446744073709551615 },
        ],
        rules: &[],
    };
    static L_PONG: Layout = Layout {
        name: "Pong", id: 7, major: 1,
        fields: &[
            Field { id: 1, name: "session", required: true, kind: Kind::Uint, range: 0..=18446744073709551615 },
            Field { id: 2, name: "request", required: true, kind: Kind::Uint, range: 0..=18446744073709551615 },
        ],
        rules: &[],
    };
    static L_DESCRIBE: Layout = Layout {
        name: "Describe", id: 257, major: 1,
        fields: &[
            Field { id: 1, name: "session", required: true, kind: Kind::Uint, range: 0..=18446744073709551615 },
            Field { id: 2, name: "request", required: true, kind: Kind::Uint, range: 0..=18446744073709551615 },
            Field { id: 3, name: "version", required: true, kind: Kind::Uint, range: 1..=4294967295 },
            Field { id: 4, name: "geometry", required: true, kind: Kind::Bytes, range: 0..=8388608 },
            Field { id: 5, name: "digest", required: true, kind: Kind::Bytes, range: 32..=32 },
            Field { id: 6, name: "endpoints", required: false, kind: Kind::List(&Kind::Struct(&L_ENDPOINT)), range: 1..=65536 },
        ],
        rules: &[
            Rule { error: "NOT_ASCENDING", holds: Predicate::Ascend("endpoints", Some("rank")) },
        ],
    };
    static L_DESCRIPTION: Layout = Layout {
        name: "Description", id: 258, major: 1,
        fields: &[
            Field { id: 1, name: "session", required: true, kind: Kind::Uint, range: 0..=18446744073709551615 },
            Field { id: 2, name: "request", required: true, kind: Kind::Uint, range: 0..=18446744073709551615 },
            Field { id: 3, name: "version", required: true, kind: Kind::Uint, range: 1..=4294967295 },
            Field { id: 4, name: "geometry", required: true, kind: Kind::Bytes, range: 0..=8388608 },
            Field { id: 5, name: "digest", required: true, kind: Kind::Bytes, range: 32..=32 },
        ],
        rules: &[],
    };
    static L_REGISTER: Layout = Layout {
        name: "Register", id: 259, major: 1,
        fields: &[
            Field { id: 1, name: "session", required: true, kind: Kind::Uint, range: 0..=18446744073709551615 },
            Field { id: 2, name: "request", required: true, kind: Kind::Uint, range: 0..=18446744073709551615 },
            Field { id: 3, name: "source", required: true, kind: Kind::Bytes, range: 32..=32 },
            Field { id: 4, name: "sink", required: true, kind: Kind::Bytes, range: 32..=32 },
            Field { id: 5, name: "epoch", required: true, kind: Kind::Uint, range: 1..=4294967295 },
            Field { id: 6, name: "access", required: true, kind: Kind::Enum(&E_ACCESS), range: 0..=65535 },
            Field { id: 7, name: "regions", required: true, kind: Kind::List(&Kind::Struct(&L_REGION)), range: 0..=65536 },
            Field { id: 8, name: "columns", required: true, kind: Kind::List(&Kind::Struct(&L_COLUMNS)), range: 0..=65536 },
            Field { id: 9, name: "routes", required: true, kind: Kind::List(&Kind::Struct(&L_ROUTE_REF)), range: 0..=65536 },
            Field { id: 10, name: "plan", required: true, kind: Kind::Bytes, range: 32..=32 },
        ],
        rules: &[
            Rule { error: "NOT_ASCENDING", holds: Predicate::Ascend("regions", Some("id")) },
            Rule { error: "NOT_ASCENDING", holds: Predicate::Ascend("columns", Some("group")) },
            Rule { error: "NOT_ASCENDING", holds: Predicate::Ascend("routes", Some("group")) },
        ],
    };
    static L_REGISTERED: Layout = Layout {
        name: "Registered", id: 260, major: 1,
        fields: &[
            Field { id: 1, name: "session", required: true, kind: Kind::Uint, range: 0..=18446744073709551615 },
            Field { id: 2, name: "request", required: true, kind: Kind::Uint, range: 0..=18446744073709551615 },
            Field { id: 3, name: "epoch", required: true, kind: Kind::Uint, range: 1..=4294967295 },
            Field { id: 4, name: "transport", required: true, kind: Kind::Enum(&E_TRANSPORT), range: 0..=65535 },
            Field { id: 5, name: "routes", required: true, kind: Kind::List(&Kind::Struct(&L_ROUTE_REF)), range: 0..=65536 },
            Field { id: 6, name: "plan", required: true, kind: Kind::Bytes, range: 32..=32 },
            Field { id: 7, name: "process", required: false, kind: Kind::Struct(&L_PROCESS), range: 0..=0 },
        ],
        rules: &[
            Rule { error: "NOT_ASCENDING", holds: Predicate::Ascend("routes", Some("group")) },
        ],
    };
    static L_UNREGISTER: Layout = Layout {
        name: "Unregister", id: 261, major: 1,
        fields: &[
            Field { id: 1, name: "session", required: true, kind: Kind::Uint, range: 0..=18446744073709551615 },
            Field { id: 2, name: "request", required: true, kind: Kind::Uint, range: 0..=18446744073709551615 },
            Field { id: 3, name: "epoch", required: true, kind: Kind::Uint, range: 1..=4294967295 },
            Field { id: 4, name: "at_once", required: false, kind: Kind::Bool, range: 0..=0 },
        ],
        rules: &[],
    };
    static L_UNREGISTERED: Layout = Layout {
        name: "Unregistered", id: 262, major: 1,
        fields: &[
            Field { id: 1, name: "session", required: true, kind: Kind::Uint, range: 0..=18446744073709551615 },
            Field { id: 2, name: "request", required: true, kind: Kind::Uint, range: 0..=18446744073709551615 },
            Field { id: 3, name: "epoch", required: true, kind: Kind::Uint, range: 1..=4294967295 },
            Field { id: 4, name: "proof", required: true, kind: Kind::Enum(&E_PROOF), range: 0..=65535 },
        ],
        rules: &[],
    };
    static L_TRANSFER: Layout = Layout {
        name: "Transfer", id: 513, major: 1,
        fields: &[
            Field { id: 1, name: "session", required: true, kind: Kind::Uint, range: 0..=18446744073709551615 },
            Field { id: 2, name: "request", required: true, kind: Kind::Uint, range: 0..=18446744073709551615 },
            Field { id: 3, name: "sequence", required: true, kind: Kind::Uint, range: 1..=18446744073709551615 },
            Field { id: 4, name: "ticket", required: true, kind: Kind::Bytes, range: 16..=16 },
            Field { id: 5, name: "content", required: true, kind: Kind::Bytes, range: 32..=32 },
            Field { id: 6, name: "source_version", required: true, kind: Kind::Uint, range: 1..=4294967295 },
            Field { id: 7, name: "sink_version", required: true, kind: Kind::Uint, range: 1..=4294967295 },
            Field { id: 8, name: "epoch", required: true, kind: Kind::Uint, range: 1..=4294967295 },
            Field { id: 9, name: "grants", required: true, kind: Kind::List(&Kind::Struct(&L_GRANTS)), range: 1..=65536 },
            Field { id: 10, name: "writers", required: true, kind: Kind::Array(3), range: 1..=4194304 },
        ],
        rules: &[
            Rule { error: "NOT_ASCENDING", holds: Predicate::Ascend("grants", Some("group")) },
            Rule { error: "NOT_ASCENDING", holds: Predicate::Ascend("writers", None) },
        ],
    };
    static L_ACCEPTED: Layout = Layout {
        name: "Accepted", id: 514, major: 1,
        fields: &[
            Field { id: 1, name: "session", required: true, kind: Kind::Uint, range: 0..=18446744073709551615 },
            Field { id: 2, name: "request", required: true, kind: Kind::Uint, range: 0..=18446744073709551615 },
            Field { id: 3, name: "sequence", required: true, kind: Kind::Uint, range: 1..=18446744073709551615 },
            Field { id: 4, name: "state", required: true, kind: Kind::Enum(&E_REQUEST_STATE), range: 0..=65535 },
        ],
        rules: &[],
    };
    static L_GRANT: Layout = Layout {
        name: "Grant", id: 515, major: 1,
        fields: &[
            Field { id: 1, name: "session", required: true, kind: Kind::Uint, range: 0..=18446744073709551615 },
            Field { id: 2, name: "request", required: true, kind: Kind::Uint, range: 0..=18446744073709551615 },
            Field { id: 3, name: "sequence", required: true, kind: Kind::Uint, range: 1..=18446744073709551615 },
            Field { id: 4, name: "grants", required: true, kind: Kind::List(&Kind::Struct(&L_GRANTS)), range: 1..=65536 },
        ],
        rules: &[
            Rule { error: "NOT_ASCENDING", holds: Predicate::Ascend("grants", Some("group")) },
        ],
    };
    static L_PROGRESS: Layout = Layout {
        name: "Progress", id: 516, major: 1,
        fields: &[
            Field { id: 1, name: "session", required: true, kind: Kind::Uint, range: 0..=18446744073709551615 },
            Field { id: 3, name: "sequence", required: true, kind: Kind::Uint, range: 1..=18446744073709551615 },
            Field { id: 4, name: "state", required: true, kind: Kind::Enum(&E_REQUEST_STATE), range: 0..=65535 },
            Field { id: 5, name: "tokens", required: false, kind: Kind::Uint, range: 0..=18446744073709551615 },
        ],
        rules: &[],
    };
    static L_DONE: Layout = Layout {
        name: "Done", id: 517, major: 1,
        fields: &[
            Field { id: 1, name: "session", required: true, kind: Kind::Uint, range: 0..=18446744073709551615 },
            Field { id: 2, name: "request", required: true, kind: Kind::Uint, range: 0..=18446744073709551615 },
            Field { id: 3, name: "sequence", required: true, kind: Kind::Uint, range: 1..=18446744073709551615 },
            Field { id: 4, name: "writer", required: true, kind: Kind::Uint, range: 0..=4294967295 },
            Field { id: 5, name: "groups", required: true, kind: Kind::Array(3), range: 1..=4194304 },
            Field { id: 6, name: "bytes", required: true, kind: Kind::Uint, range: 0..=18446744073709551615 },
            Field { id: 7, name: "outcome", required: true, kind: Kind::Enum(&E_OUTCOME), range: 0..=65535 },
            Field { id: 8, name: "handoff", required: true, kind: Kind::List(&Kind::Struct(&L_HAND_OFF)), range: 0..=65536 },
            Field { id: 9, name: "checksums", required: false, kind: Kind::List(&Kind::Struct(&L_CHECKSUM)), range: 0..=65536 },
            Field { id: 10, name: "begins", required: false, kind: Kind::List(&Kind::Struct(&L_BEGIN)), range: 0..=65536 },
        ],
        rules: &[
            Rule { error: "NOT_ASCENDING", holds: Predicate::Ascend("groups", None) },
            Rule { error: "NOT_ASCENDING", holds: Predicate::Ascend("handoff", Some("group")) },
            Rule { error: "NOT_ASCENDING", holds: Predicate::Ascend("checksums", Some("group")) },
            Rule { error: "NOT_ASCENDING", holds: Predicate::Ascend("begins", Some("group")) },
        ],
    };
    static L_DONE_ACK: Layout = Layout {
        name: "DoneAck", id: 518, major: 1,
        fields: &[
            Field { id: 1, name: "session", required: true, kind: Kind::Uint, range: 0..=18446744073709551615 },
            Field { id: 2, name: "request", required: true, kind: Kind::Uint, range: 0..=18446744073709551615 },
            Field { id: 3, name: "sequence", required: true, kind: Kind::Uint, range: 1..=18446744073709551615 },
        ],
        rules: &[],
    };
    static L_FAILED: Layout = Layout {
        name: "Failed", id: 519, major: 1,
        fields: &[
            Field { id: 1, name: "session", required: true, kind: Kind::Uint, range: 0..=18446744073709551615 },
            Field { id: 2, name: "request", required: true, kind: Kind::Uint, range: 0..=18446744073709551615 },
            Field { id: 3, name: "sequence", required: true, kind: Kind::Uint, range: 1..=18446744073709551615 },
            Field { id: 4, name: "code", required: true, kind: Kind::Enum(&E_ERROR_CODE), range: 0..=65535 },
            Field { id: 5, name: "path", required: true, kind: Kind::Text, range: 0..=4096 },
            Field { id: 6, name: "mine", required: true, kind: Kind::Text, range: 0..=4096 },
            Field { id: 7, name: "yours", required: true, kind: Kind::Text, range: 0..=4096 },
            Field { id: 8, name: "advice", required: false, kind: Kind::Text, range: 0..=4096 },
        ],
        rules: &[],
    };
    static L_ABORT: Layout = Layout {
        name: "Abort", id: 520, major: 1,
        fields: &[
            Field { id: 1, name: "session", required: true, kind: Kind::Uint, range: 0..=18446744073709551615 },
            Field { id: 2, name: "request", required: true, kind: Kind::Uint, range: 0..=18446744073709551615 },
            Field { id: 3, name: "sequence", required: true, kind: Kind::Uint, range: 1..=18446744073709551615 },
            Field { id: 4, name: "reason", required: true, kind: Kind::Text, range: 0..=4096 },
        ],
        rules: &[],
    };
    static L_DRAINED: Layout = Layout {
        name: "Drained", id: 521, major: 1,
        fields: &[
            Field { id: 1, name: "session", required: true, kind: Kind::Uint, range: 0..=18446744073709551615 },
            Field { id: 2, name: "request", required: true, kind: Kind::Uint, range: 0..=18446744073709551615 },
            Field { id: 3, name: "sequence", required: true, kind: Kind::Uint, range: 1..=18446744073709551615 },
            Field { id: 4, name: "proof", required: true, kind: Kind::Enum(&E_PROOF), range: 0..=65535 },
        ],
        rules: &[],
    };
    static L_CHUNK: Layout = Layout {
        name: "Chunk", id: 769, major: 1,
        fields: &[
            Field { id: 1, name: "session", required: true, kind: Kind::Uint, range: 0..=18446744073709551615 },
            Field { id: 3, name: "sequence", required: true, kind: Kind::Uint, range: 1..=18446744073709551615 },
            Field { id: 4, name: "slot", required: true, kind: Kind::Uint, range: 0..=4294967295 },
            Field { id: 5, name: "offset", required: true, kind: Kind::Uint, range: 0..=18446744073709551615 },
            Field { id: 6, name: "bytes", required: true, kind: Kind::Uint, range: 1..=4294967295 },
            Field { id: 7, name: "last", required: true, kind: Kind::Bool, range: 0..=0 },
            Field { id: 8, name: "begins", required: false, kind: Kind::List(&Kind::Struct(&L_BEGIN)), range: 0..=65536 },
        ],
        rules: &[
            Rule { error: "NOT_ASCENDING", holds: Predicate::Ascend("begins", Some("group")) },
        ],
    };
    static L_CREDIT: Layout = Layout {
        name: "Credit", id: 770, major: 1,
        fields: &[
            Field { id: 1, name: "session", required: true, kind: Kind::Uint, range: 0..=18446744073709551615 },
            Field { id: 3, name: "kind", required: true, kind: Kind::Enum(&E_CREDIT_KIND), range: 0..=65535 },
            Field { id: 4, name: "slots", required: false, kind: Kind::Array(3), range: 0..=4194304 },
            Field { id: 5, name: "total", required: false, kind: Kind::Uint, range: 0..=18446744073709551615 },
            Field { id: 6, name: "epoch", required: false, kind: Kind::Uint, range: 1..=4294967295 },
        ],
        rules: &[
            Rule { error: "FIELD_CONFLICT", holds: Predicate::PresentIff("slots", "kind", "STAGING") },
            Rule { error: "FIELD_CONFLICT", holds: Predicate::PresentIff("total", "kind", "INLINE") },
            Rule { error: "NOT_ASCENDING", holds: Predicate::Ascend("slots", None) },
        ],
    };
    static L_DATA: Layout = Layout {
        name: "Data", id: 771, major: 1,
        fields: &[
            Field { id: 1, name: "session", required: true, kind: Kind::Uint, range: 0..=18446744073709551615 },
            Field { id: 3, name: "sequence", required: true, kind: Kind::Uint, range: 1..=18446744073709551615 },
            Field { id: 4, name: "offset", required: true, kind: Kind::Uint, range: 0..=18446744073709551615 },
            Field { id: 5, name: "data", required: true, kind: Kind::Bytes, range: 1..=262144 },
            Field { id: 6, name: "last", required: true, kind: Kind::Bool, range: 0..=0 },
            Field { id: 7, name: "begins", required: false, kind: Kind::List(&Kind::Struct(&L_BEGIN)), range: 0..=65536 },
        ],
        rules: &[
            Rule { error: "NOT_ASCENDING", holds: Predicate::Ascend("begins", Some("group")) },
        ],
    };
    static L_OFFER: Layout = Layout {
        name: "Offer", id: 1025, major: 1,
        fields: &[
            Field { id: 1, name: "session", required: true, kind: Kind::Uint, range: 0..=18446744073709551615 },
            Field { id: 2, name: "request", required: true, kind: Kind::Uint, range: 0..=18446744073709551615 },
            Field { id: 3, name: "sequence", required: true, kind: Kind::Uint, range: 1..=18446744073709551615 },
            Field { id: 4, name: "writer", required: true, kind: Kind::Uint, range: 0..=4294967295 },
            Field { id: 5, name: "epoch", required: true, kind: Kind::Uint, range: 1..=4294967295 },
            Field { id: 6, name: "grants", required: true, kind: Kind::List(&Kind::Struct(&L_GRANTS)), range: 1..=65536 },
            Field { id: 7, name: "lease", required: true, kind: Kind::Uint, range: 1..=18446744073709551615 },
            Field { id: 8, name: "outcome", required: true, kind: Kind::Enum(&E_OUTCOME), range: 0..=65535 },
            Field { id: 9, name: "handoff", required: true, kind: Kind::List(&Kind::Struct(&L_HAND_OFF)), range: 0..=65536 },
            Field { id: 10, name: "checksums", required: false, kind: Kind::List(&Kind::Struct(&L_CHECKSUM)), range: 0..=65536 },
            Field { id: 11, name: "begins", required: false, kind: Kind::List(&Kind::Struct(&L_BEGIN)), range: 0..=65536 },
        ],
        rules: &[
            Rule { error: "NOT_ASCENDING", holds: Predicate::Ascend("grants", Some("group")) },
            Rule { error: "NOT_ASCENDING", holds: Predicate::Ascend("handoff", Some("group")) },
            Rule { error: "NOT_ASCENDING", holds: Predicate::Ascend("checksums", Some("group")) },
            Rule { error: "NOT_ASCENDING", holds: Predicate::Ascend("begins", Some("group")) },
        ],
    };
    static L_PULLED: Layout = Layout {
        name: "Pulled", id: 1026, major: 1,
        fields: &[
            Field { id: 1, name: "session", required: true, kind: Kind::Uint, range: 0..=18446744073709551615 },
            Field { id: 2, name: "request", required: true, kind: Kind::Uint, range: 0..=18446744073709551615 },
            Field { id: 3, name: "sequence", required: true, kind: Kind::Uint, range: 1..=18446744073709551615 },
            Field { id: 4, name: "bytes", required: true, kind: Kind::Uint, range: 0..=18446744073709551615 },
        ],
        rules: &[],
    };
    static L_RELEASED: Layout = Layout {
        name: "Released", id: 1027, major: 1,
        fields: &[
            Field { id: 1, name: "session", required: true, kind: Kind::Uint, range: 0..=18446744073709551615 },
            Field { id: 3, name: "sequence", required: true, kind: Kind::Uint, range: 1..=18446744073709551615 },
        ],
        rules: &[],
    };
    static L_RENEW: Layout = Layout {
        name: "Renew", id: 1028, major: 1,
        fields: &[
            Field { id: 1, name: "session", required: true, kind: Kind::Uint, range: 0..=18446744073709551615 },
            Field { id: 2, name: "request", required: true, kind: Kind::Uint, range: 0..=18446744073709551615 },
            Field { id: 3, name: "sequence", required: true, kind: Kind::Uint, range: 1..=18446744073709551615 },
            Field { id: 4, name: "lease", required: true, kind: Kind::Uint, range: 1..=18446744073709551615 },
        ],
        rules: &[],
    };
    static L_RENEWED: Layout = Layout {
        name: "Renewed", id: 1029, major: 1,
        fields: &[
            Field { id: 1, name: "session", required: true, kind: Kind::Uint, range: 0..=18446744073709551615 },
            Field { id: 2, name: "request", required: true, kind: Kind::Uint, range: 0..=18446744073709551615 },
            Field { id: 3, name: "sequence", required: true, kind: Kind::Uint, range: 1..=18446744073709551615 },
            Field { id: 4, name: "lease", required: true, kind: Kind::Uint, range: 1..=18446744073709551615 },
        ],
        rules: &[],
    };
    static L_WATCH: Layout = Layout {
        name: "Watch", id: 1281, major: 1,
        fields: &[
            Field { id: 1, name: "session", required: true, kind: Kind::Uint, range: 0..=18446744073709551615 },
            Field { id: 2, name: "request", required: true, kind: Kind::Uint, range: 0..=18446744073709551615 },
            Field { id: 5, name: "after", required: false, kind: Kind::Bytes, range: 32..=32 },
        ],
        rules: &[],
    };
    static L_WATCHED: Layout = Layout {
        name: "Watched", id: 1282, major: 1,
        fields: &[
            Field { id: 1, name: "session", required: true, kind: Kind::Uint, range: 0..=18446744073709551615 },
            Field { id: 2, name: "request", required: true, kind: Kind::Uint, range: 0..=18446744073709551615 },
            Field { id: 5, name: "number", required: true, kind: Kind::Uint, range: 0..=18446744073709551615 },
            Field { id: 6, name: "namespace", required: true, kind: Kind::Bytes, range: 32..=32 },
            Field { id: 7, name: "page", required: true, kind: Kind::Uint, range: 1..=4294967295 },
            Field { id: 8, name: "form", required: true, kind: Kind::Enum(&E_KEY_FORM), range: 0..=65535 },
            Field { id: 9, name: "pages", required: true, kind: Kind::List(&Kind::Struct(&L_KEPT_PAGE)), range: 0..=1024 },
            Field { id: 10, name: "more", required: true, kind: Kind::Bool, range: 0..=0 },
        ],
        rules: &[
            Rule { error: "NOT_ASCENDING", holds: Predicate::Ascend("pages", Some("id")) },
        ],
    };
    static L_KEPT: Layout = Layout {
        name: "Kept", id: 1283, major: 1,
        fields: &[
            Field { id: 1, name: "session", required: true, kind: Kind::Uint, range: 0..=18446744073709551615 },
            Field { id: 5, name: "number", required: true, kind: Kind::Uint, range: 1..=18446744073709551615 },
            Field { id: 6, name: "pages", required: true, kind: Kind::List(&Kind::Struct(&L_KEPT_PAGE)), range: 1..=1024 },
        ],
        rules: &[
            Rule { error: "NOT_ASCENDING", holds: Predicate::Ascend("pages", Some("id")) },
        ],
    };
    pub static MESSAGES: &[&Layout] = &[&L_HELLO, &L_WELCOME, &L_REFUSED, &L_ERROR, &L_GOODBYE, &L_PING, &L_PONG, &L_DESCRIBE, &L_DESCRIPTION, &L_REGISTER, &L_REGISTERED, &L_UNREGISTER, &L_UNREGISTERED, &L_TRANSFER, &L_ACCEPTED, &L_GRANT, &L_PROGRESS, &L_DONE, &L_DONE_ACK, &L_FAILED, &L_ABORT, &L_DRAINED, &L_CHUNK, &L_CREDIT, &L_DATA, &L_OFFER, &L_PULLED, &L_RELEASED, &L_RENEW, &L_RENEWED, &L_WATCH, &L_WATCHED, &L_KEPT];
    pub static STRUCTS: &[&Layout] = &[&L_VERSION, &L_VERSION_RANGE, &L_LIMITS, &L_ENDPOINT, &L_GEOMETRY, &L_FACT, &L_GROUP, &L_PART, &L_RANK, &L_OWNS, &L_LANE_SPAN, &L_REGION, &L_HANDLE, &L_PROCESS, &L_COLUMNS, &L_ROUTE_REF, &L_GRANTS, &L_BEGIN, &L_HAND_OFF, &L_CHECKSUM, &L_TICKET, &L_CONTENT, &L_AXIS, &L_MANIFEST, &L_COMPONENT, &L_KEPT_PAGE];
    // end facts
}
