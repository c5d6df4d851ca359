//! The strict reader (framing.md, Reader): one pass over the body in byte order, and the first failure is the error.

use crate::enums::ErrorCode;
use crate::error::{refuse, refuse_if, Error, Result};
use crate::facts::{MAX_ARRAY, MAX_BODY, MAX_BYTES, MAX_DEPTH, MAX_LIST, MAX_STRING};
use crate::layout::{Kind, Layout};
use crate::value::{bits_of, enum_value, in_range, Numbers, Record, Value, ALL};
use alloc::format;
use core::ops::RangeInclusive;

#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Family {
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
fn form(first: u8) -> Option<(Family, usize, u64)> {
    Some(match first {
        0x00..=0x7f => (Family::Uint, 0, first.into()),
        0x80..=0x8f => (Family::Map, 0, (first - 0x80).into()),
        0x90..=0x9f => (Family::List, 0, (first - 0x90).into()),
        0xa0..=0xbf => (Family::Text, 0, (first - 0xa0).into()),
        0xc2..=0xc3 => (Family::Bool, 0, (first - 0xc2).into()),
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
fn shortest(family: Family, width: usize, value: u64) -> bool {
    let least: u64 = if width == 1 { 0 } else { 1 << (4 * width) };
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

/// Bytes of an element of a number array, by its code.
pub(crate) fn width(code: u8) -> usize {
    1 << ((code - 1) % 4)
}

/// Whether half the width of a code would hold every element.
fn narrow(code: u8, bytes: &[u8]) -> bool {
    let (size, half) = (width(code), 4 * width(code));
    if code <= 4 {
        return bits_of(size, bytes) >> half == 0;
    }
    bytes.chunks_exact(size).all(|it| {
        let shift = 64 - 8 * size;
        let number = (crate::value::little(it) << shift) as i64 >> shift;
        (-(1 << (half - 1))..1 << (half - 1)).contains(&number)
    })
}

pub(crate) struct Reader<'a> {
    data: &'a [u8],
    /// Entries and elements that the body may still have.
    values: u64,
}

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8]> {
        self.room(count as u64)?;
        let (taken, rest) = self.data.split_at(count);
        self.data = rest;
        Ok(taken)
    }

    fn room(&self, count: u64) -> Result<()> {
        if count <= self.data.len() as u64 {
            return Ok(());
        }
        let mine = format!("{} bytes", count);
        Err(Error::at(ErrorCode::TRUNCATED, "").between(mine, format!("{}", self.data.len())))
    }

    /// The family of a value, with its number, or its length in bytes or elements.
    fn head(&mut self, wanted: impl Fn(Family) -> bool) -> Result<(Family, u64)> {
        let first = self.take(1)?[0];
        let (family, width, small) = match form(first) {
            Some(form) if wanted(form.0) => form,
            _ => return Err(Error::at(ErrorCode::BAD_TYPE, "").between("", format!("byte {:02x}", first))),
        };
        let number = self.take(width)?.iter().fold(small, |number, byte| number << 8 | u64::from(*byte));
        refuse_if(!shortest(family, width, number), ErrorCode::NOT_CANONICAL)?;
        Ok((family, number))
    }

    fn length(&mut self, family: Family) -> Result<u64> {
        Ok(self.head(|found| found == family)?.1)
    }

    fn uint(&mut self) -> Result<u64> {
        let (family, number) = self.head(|found| found == Family::Uint || found == Family::Signed)?;
        refuse_if(family == Family::Signed, ErrorCode::BAD_TYPE)?;
        Ok(number)
    }

    /// The entries of a map or elements of a list at a depth, all of which the buffer may have.
    fn open(&mut self, family: Family, depth: u64) -> Result<u64> {
        refuse_if(depth > MAX_DEPTH, ErrorCode::TOO_DEEP)?;
        let count = self.length(family)?;
        refuse_if(count > MAX_LIST || count > self.values, ErrorCode::TOO_LARGE)?;
        self.values -= count;
        self.room(if family == Family::Map { 2 * count } else { count })?;
        Ok(count)
    }

    fn record(&mut self, layout: &'static Layout, depth: u64) -> Result<Record<'a>> {
        let entries = self.open(Family::Map, depth)?;
        let mut record = Record::empty(layout);
        let mut last = 0;
        for _ in 0..entries {
            let id = self.uint()?;
            let place = layout.fields.iter().position(|field| u64::from(field.id) == id);
            let read = ascends(id, &mut last).and_then(|()| match place {
                Some(place) => {
                    let field = &layout.fields[place];
                    record.set(place, self.value(&field.kind, &field.range, depth)?);
                    Ok(())
                }
                None if id < 0x8000 => refuse(ErrorCode::UNKNOWN_FIELD),
                None => self.skip(depth).map_err(|error| Error { path: Default::default(), ..error }),
            });
            read.map_err(|error| match place {
                Some(place) => error.under(layout.fields[place].name),
                None => error.under(&format!("#{:04x}", id)),
            })?;
        }
        record.check_rules()?;
        Ok(record)
    }

    fn value(&mut self, kind: &Kind, range: &RangeInclusive<u64>, depth: u64) -> Result<Value<'a>> {
        Ok(match kind {
            Kind::Uint => {
                let number = self.uint()?;
                in_range(number, range)?;
                Value::Uint(number)
            }
            Kind::Bool => Value::Bool(self.length(Family::Bool)? == 1),
            Kind::Text => {
                let text = self.text()?;
                in_range(text.len() as u64, range)?;
                Value::Text(text.into())
            }
            Kind::Bytes => {
                let bytes = self.string(Family::Bytes, MAX_BYTES)?;
                in_range(bytes.len() as u64, range)?;
                Value::Bytes(bytes.into())
            }
            Kind::Enum(it) => {
                let number = self.uint()?;
                Value::Uint(enum_value(it, number)?)
            }
            Kind::Array(widest) => {
                let (code, bytes) = self.array(1..=*widest)?;
                let numbers = Numbers::Packed { width: width(code), bytes };
                in_range(numbers.len() as u64, range)?;
                Value::Array(numbers)
            }
            Kind::List(inner) => {
                let count = self.open(Family::List, depth + 1)?;
                in_range(count, range)?;
                let element = |i| self.value(inner, &ALL, depth + 1).map_err(|error| error.index(i));
                Value::List((0..count as usize).map(element).collect::<Result<_>>()?)
            }
            Kind::Struct(layout) => Value::Struct(self.record(layout, depth + 1)?),
        })
    }

    fn string(&mut self, family: Family, limit: u64) -> Result<&'a [u8]> {
        let length = self.length(family)?;
        if length > limit {
            return Err(Error::at(ErrorCode::TOO_LARGE, "").between(limit, length));
        }
        self.room(length)?;
        self.take(length as usize)
    }

    fn text(&mut self) -> Result<&'a str> {
        let bytes = self.string(Family::Text, MAX_STRING)?;
        core::str::from_utf8(bytes).or_else(|_| refuse(ErrorCode::BAD_TEXT))
    }

    /// The code of a number array, one of those, and its bytes.
    fn array(&mut self, codes: RangeInclusive<u8>) -> Result<(u8, &'a [u8])> {
        let length = self.length(Family::Array)?;
        let code = self.take(1)?[0];
        refuse_if(!codes.contains(&code), ErrorCode::BAD_TYPE)?;
        let size = width(code) as u64;
        refuse_if(length % size != 0, ErrorCode::BAD_LENGTH)?;
        refuse_if(length / size > MAX_ARRAY, ErrorCode::TOO_LARGE)?;
        self.room(length)?;
        let bytes = self.take(length as usize)?;
        let wasteful = if bytes.is_empty() { code != 1 } else { size > 1 && narrow(code, bytes) };
        refuse_if(wasteful, ErrorCode::NOT_CANONICAL)?;
        Ok((code, bytes))
    }

    /// Passes over a value inside a map or list of a depth, which keeps all rules that need no table.
    fn skip(&mut self, depth: u64) -> Result<()> {
        let first = match self.data.first() {
            Some(first) => *first,
            None => return refuse(ErrorCode::TRUNCATED),
        };
        match form(first).map(|form| form.0) {
            None => return refuse(ErrorCode::BAD_TYPE),
            Some(Family::Text) => drop(self.text()?),
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
fn ascends(id: u64, last: &mut u64) -> Result<()> {
    refuse_if(id <= *last, ErrorCode::FIELD_ORDER)?;
    *last = id;
    refuse_if(id > 0xffff, ErrorCode::OUT_OF_RANGE)
}

/// The body of a message, or a bare struct, as a map that borrows from it.
///
/// # Errors
///
/// The first thing that a strict reader refuses, with its path (framing.md, Reader).
pub fn read_body<'a>(layout: &'static Layout, body: &'a [u8]) -> Result<Record<'a>> {
    if body.len() as u64 > MAX_BODY {
        return Err(Error::at(ErrorCode::TOO_LARGE, "").between(MAX_BODY, body.len()));
    }
    let mut reader = Reader { data: body, values: layout.most_values() };
    let record = reader.record(layout, 1)?;
    if !reader.data.is_empty() {
        return Err(Error::at(ErrorCode::TRAILING_BYTES, "").between("", reader.data.len()));
    }
    Ok(record)
}
