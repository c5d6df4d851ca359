//! The JSON form of messages and structs (json.md): for tickets, which routers carry, and for logs and tools.

use crate::body::Body;
use crate::enums::ErrorCode;
use crate::error::{refuse, refuse_at, refuse_if, Error, Result};
use crate::layout::{Kind, Layout};
use crate::reader::width;
use crate::value::{enum_value, in_range, sized, Numbers, Record, Value, ALL};
use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::ops::RangeInclusive;

/// A message or struct of its JSON form.
///
/// # Errors
///
/// The first thing that a reader of the JSON form refuses; `BAD_TYPE` if the text is no JSON.
pub fn from_text<T: Body>(text: &str) -> Result<T> {
    let json = match Json::parse(text) {
        Some(json) => json,
        None => return Err(Error::at(ErrorCode::BAD_TYPE, "").between("JSON", "another text")),
    };
    T::from_record(from_json(T::layout(), &json)?)
}

/// The JSON form of a message or struct, its secrets too.
///
/// # Errors
///
/// What no writer may write: a value out of its range, or a broken rule.
pub fn to_text<T: Body>(value: &T) -> Result<String> {
    let record = value.to_record();
    record.check()?;
    let mut out = String::new();
    to_json(&record, &mut out);
    Ok(out)
}

/// A JSON value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Json {
    /// `null`.
    Null,
    /// `true` or `false`.
    Bool(bool),
    /// A number as it was written: doubles have no part in it.
    Number(String),
    /// A string.
    Text(String),
    /// A string with half a surrogate pair, which is not UTF-8.
    Broken,
    /// An array.
    List(Vec<Json>),
    /// An object, in the order of its keys; of a key that comes twice, the first counts.
    Map(Vec<(String, Json)>),
}

impl Json {
    /// A text as JSON; none if it is not, or is nested more than 512 deep.
    pub fn parse(text: &str) -> Option<Json> {
        let mut parser = Parser { data: text.as_bytes(), at: 0 };
        let value = parser.value(0)?;
        parser.blank();
        if parser.at == parser.data.len() {
            Some(value)
        } else {
            None
        }
    }

    /// The value of a key, if it is an object that has it.
    pub fn get(&self, key: &str) -> Option<&Json> {
        match self {
            Json::Map(entries) => entries.iter().find(|entry| entry.0 == key).map(|entry| &entry.1),
            _ => None,
        }
    }

    /// The string, if it is one.
    pub fn text(&self) -> Option<&str> {
        match self {
            Json::Text(text) => Some(text),
            _ => None,
        }
    }

    /// The elements, if it is an array.
    pub fn list(&self) -> Option<&[Json]> {
        match self {
            Json::List(items) => Some(items),
            _ => None,
        }
    }

    /// The integer, in either of its forms.
    pub fn uint(&self) -> Option<u64> {
        uint_from_json(self).ok()
    }
}

struct Parser<'a> {
    data: &'a [u8],
    at: usize,
}

impl Parser<'_> {
    const DEEPEST: usize = 512;

    fn blank(&mut self) {
        while matches!(self.data.get(self.at), Some(b' ' | b'\t' | b'\n' | b'\r')) {
            self.at += 1;
        }
    }

    fn eat(&mut self, text: &str) -> Option<()> {
        if self.data.get(self.at..)?.starts_with(text.as_bytes()) {
            self.at += text.len();
            Some(())
        } else {
            None
        }
    }

    fn value(&mut self, depth: usize) -> Option<Json> {
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

    fn items(&mut self, close: u8, mut item: impl FnMut(&mut Self) -> Option<()>) -> Option<()> {
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

    fn unit(&mut self) -> Option<u32> {
        let digits = core::str::from_utf8(self.data.get(self.at..self.at + 4)?).ok()?;
        self.at += 4;
        if digits.starts_with('+') {
            return None;
        }
        u32::from_str_radix(digits, 16).ok()
    }

    /// A string, and whether there is no half of a surrogate pair in it, for which it has U+FFFD.
    fn string(&mut self) -> Option<(String, bool)> {
        self.eat("\"")?;
        let mut out = Vec::new();
        let mut whole = true;
        loop {
            let byte = *self.data.get(self.at)?;
            self.at += 1;
            match byte {
                b'"' => return Some((String::from_utf8(out).ok()?, whole)),
                b'\\' => {
                    let code = self.escape()?;
                    let it = char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER);
                    whole &= it as u32 == code;
                    out.extend_from_slice(it.encode_utf8(&mut [0; 4]).as_bytes());
                }
                _ => out.push(byte),
            }
        }
    }

    /// What stands after a backslash, as a code point, or half a surrogate pair.
    fn escape(&mut self) -> Option<u32> {
        let escape = *self.data.get(self.at)?;
        self.at += 1;
        Some(match escape {
            b'"' | b'\\' | b'/' => escape.into(),
            b'b' => 8,
            b'f' => 12,
            b'n' => 10,
            b'r' => 13,
            b't' => 9,
            b'u' => {
                let (high, before) = (self.unit()?, self.at);
                if !(0xd800..0xdc00).contains(&high) || self.eat("\\u").is_none() {
                    return Some(high);
                }
                let low = self.unit()?;
                if (0xdc00..0xe000).contains(&low) {
                    0x10000 + ((high - 0xd800) << 10) + (low - 0xdc00)
                } else {
                    self.at = before;
                    high
                }
            }
            _ => return None,
        })
    }
}

/// A map by its JSON form, which borrows texts from it.
///
/// # Errors
///
/// The first thing that a reader of the JSON form refuses (json.md).
pub fn from_json<'a>(layout: &'static Layout, json: &'a Json) -> Result<Record<'a>> {
    let entries = match json {
        Json::Map(entries) => entries,
        _ => return refuse(ErrorCode::BAD_TYPE),
    };
    for (key, _) in entries {
        if !key.starts_with("x_") && layout.place(key).is_none() {
            return refuse_at(ErrorCode::UNKNOWN_FIELD, key);
        }
    }
    let mut record = Record::empty(layout);
    for (place, field) in layout.fields.iter().enumerate() {
        match json.get(field.name) {
            None if field.required => return refuse_at(ErrorCode::MISSING_FIELD, field.name),
            None => (),
            Some(json) => {
                let value = value_from_json(&field.kind, &field.range, json);
                record.set(place, value.map_err(|error| error.under(field.name))?);
            }
        }
    }
    record.check_rules()?;
    Ok(record)
}

fn value_from_json<'a>(kind: &Kind, range: &RangeInclusive<u64>, json: &'a Json) -> Result<Value<'a>> {
    Ok(match (kind, json) {
        (Kind::Uint, _) => {
            let number = uint_from_json(json)?;
            in_range(number, range)?;
            Value::Uint(number)
        }
        (Kind::Bool, Json::Bool(it)) => Value::Bool(*it),
        (Kind::Text, Json::Text(text)) => {
            sized(kind, range, text.len())?;
            Value::Text(text.as_str().into())
        }
        (Kind::Text, Json::Broken) => return refuse(ErrorCode::BAD_TEXT),
        (Kind::Bytes, Json::Text(text)) => {
            let bytes = from_hex(text).map_or_else(|| refuse(ErrorCode::BAD_TYPE), Ok)?;
            sized(kind, range, bytes.len())?;
            Value::Bytes(bytes.into())
        }
        (Kind::Enum(it), Json::Text(name)) => {
            Value::Uint(it.value(name).map_or_else(|| refuse(ErrorCode::UNKNOWN_ENUM_VALUE), Ok)?)
        }
        (Kind::Enum(_), Json::Broken) => return refuse(ErrorCode::UNKNOWN_ENUM_VALUE),
        (Kind::Enum(it), Json::Map(entries)) if entries.len() == 1 && entries[0].0 == "unknown" => {
            let number = uint_from_json(&entries[0].1)?;
            in_range(number, &(0..=0xffff))?;
            refuse_if(it.name(number).is_some(), ErrorCode::UNKNOWN_ENUM_VALUE)?;
            Value::Uint(enum_value(it, number)?)
        }
        (Kind::Array(widest), Json::List(elements)) => {
            let most = u64::MAX >> (64 - 8 * width(*widest));
            let number = |(i, json)| {
                let number = uint_from_json(json).and_then(|number| in_range(number, &(0..=most)).map(|_| number));
                number.map_err(|error| error.index(i))
            };
            let numbers = elements.iter().enumerate().map(number).collect::<Result<Vec<u64>>>()?;
            sized(kind, range, numbers.len())?;
            Value::Array(Numbers::U64(numbers.into()))
        }
        (Kind::List(inner), Json::List(elements)) => {
            let value = |(i, json)| value_from_json(inner, &ALL, json).map_err(|error| error.index(i));
            let values = elements.iter().enumerate().map(value).collect::<Result<Vec<Value<'a>>>>()?;
            sized(kind, range, values.len())?;
            Value::List(values)
        }
        (Kind::Struct(layout), _) => Value::Struct(from_json(layout, json)?),
        _ => return refuse(ErrorCode::BAD_TYPE),
    })
}

fn uint_from_json(json: &Json) -> Result<u64> {
    let (digits, most) = match json {
        Json::Text(digits) => (digits, u64::MAX),
        Json::Number(digits) => (digits, (1 << 53) - 1),
        _ => return refuse(ErrorCode::BAD_TYPE),
    };
    let canonical = digits == "0" || !digits.starts_with('0') && !digits.is_empty();
    refuse_if(!canonical || !digits.bytes().all(|byte| byte.is_ascii_digit()), ErrorCode::BAD_TYPE)?;
    match digits.parse::<u64>() {
        Ok(number) if number <= most => Ok(number),
        _ if most < u64::MAX => refuse(ErrorCode::BAD_TYPE),
        _ => refuse(ErrorCode::OUT_OF_RANGE),
    }
}

/// Bytes of lower-case hex; none if it is something else.
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

/// Lower-case hex of bytes.
pub fn hex(bytes: &[u8]) -> String {
    let digit = |value: u8| char::from(b"0123456789abcdef"[usize::from(value)]);
    bytes.iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 15)]).collect()
}

/// Appends a string in quotes.
pub fn quote(text: &str, out: &mut String) {
    out.push('"');
    for it in text.chars() {
        match it {
            '"' | '\\' => out.extend(['\\', it]),
            it if it < ' ' => out.push_str(&format!("\\u{:04x}", u32::from(it))),
            it => out.push(it),
        }
    }
    out.push('"');
}

fn commas<T>(out: &mut String, items: impl Iterator<Item = T>, mut item: impl FnMut(&mut String, T)) {
    for (i, it) in items.enumerate() {
        if i > 0 {
            out.push_str(", ");
        }
        item(out, it);
    }
}

/// Appends the JSON form of a map, its secrets too.
pub fn to_json(record: &Record<'_>, out: &mut String) {
    out.push('{');
    commas(out, record.fields(), |out, (field, value)| {
        quote(field.name, out);
        out.push_str(": ");
        value_to_json(&field.kind, value, out);
    });
    out.push('}');
}

fn value_to_json(kind: &Kind, value: &Value<'_>, out: &mut String) {
    match (value, kind) {
        (Value::Uint(number), Kind::Enum(it)) => match it.name(*number) {
            Some(name) => quote(name, out),
            None => out.push_str(&format!("{{\"unknown\": \"{}\"}}", number)),
        },
        (Value::Uint(number), _) => quote(&number.to_string(), out),
        (Value::Bool(it), _) => out.push_str(if *it { "true" } else { "false" }),
        (Value::Text(text), _) => quote(text, out),
        (Value::Bytes(bytes), _) => quote(&hex(bytes), out),
        (Value::Array(numbers), _) => {
            out.push('[');
            commas(out, numbers.iter(), |out, number| quote(&number.to_string(), out));
            out.push(']');
        }
        (Value::List(values), kind) => {
            let inner = if let Kind::List(inner) = kind { inner } else { kind };
            out.push('[');
            commas(out, values.iter(), |out, value| value_to_json(inner, value, out));
            out.push(']');
        }
        (Value::Struct(record), _) => to_json(record, out),
    }
}
