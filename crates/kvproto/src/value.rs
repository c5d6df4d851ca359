//! Values as the codec reads and writes them: maps by their layout, which borrow from the frame.

use crate::enums::ErrorCode;
use crate::error::{refuse, refuse_at, Error, Result};
use crate::layout::{Field, Kind, Layout};
use alloc::borrow::Cow;
use alloc::format;
use alloc::vec::Vec;
use core::fmt;
use core::ops::RangeInclusive;

/// A value of a field, or an element of a list.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Value<'a> {
    /// An integer, or the number of a value of an enum.
    Uint(u64),
    /// A truth value.
    Bool(bool),
    /// A text.
    Text(Cow<'a, str>),
    /// Bytes.
    Bytes(Cow<'a, [u8]>),
    /// A number array.
    Array(Numbers<'a>),
    /// A list.
    List(Vec<Value<'a>>),
    /// A map.
    Struct(Record<'a>),
}

impl Value<'_> {
    /// The integer or number of an enum, if it is one.
    pub fn number(&self) -> Option<u64> {
        match self {
            Value::Uint(number) => Some(*number),
            _ => None,
        }
    }
}

/// The elements of a number array: as they stand in a frame, or as a slice.
#[derive(Clone)]
#[non_exhaustive]
pub enum Numbers<'a> {
    /// Little-endian elements of 1, 2, 4 or 8 bytes.
    Packed {
        /// Bytes of an element.
        width: usize,
        /// All of them.
        bytes: &'a [u8],
    },
    /// Numbers of 32 bits.
    U32(&'a [u32]),
    /// Numbers of 64 bits.
    U64(Cow<'a, [u64]>),
}

impl<'a> Numbers<'a> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Numbers::Packed { width, bytes } => bytes.len() / width,
            Numbers::U32(numbers) => numbers.len(),
            Numbers::U64(numbers) => numbers.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The element at a place, from 0.
    pub fn get(&self, index: usize) -> Option<u64> {
        match self {
            Numbers::Packed { width, bytes } => {
                let begin = index.checked_mul(*width)?;
                bytes.get(begin..begin.checked_add(*width)?).map(little)
            }
            Numbers::U32(numbers) => numbers.get(index).map(|it| (*it).into()),
            Numbers::U64(numbers) => numbers.get(index).copied(),
        }
    }

    /// The elements, in order.
    pub fn iter(&self) -> impl Iterator<Item = u64> + '_ {
        (0..self.len()).filter_map(move |index| self.get(index))
    }

    /// The elements as numbers of 32 bits; none if one is greater.
    pub fn to_u32(&self) -> Option<Vec<u32>> {
        match self {
            Numbers::Packed { width: 1, bytes } => Some(bytes.iter().map(|it| (*it).into()).collect()),
            Numbers::Packed { width: 2, bytes } => {
                Some(bytes.chunks_exact(2).map(|it| u16::from_le_bytes([it[0], it[1]]).into()).collect())
            }
            Numbers::Packed { width: 4, bytes } => {
                Some(bytes.chunks_exact(4).map(|it| u32::from_le_bytes([it[0], it[1], it[2], it[3]])).collect())
            }
            Numbers::U32(numbers) => Some(numbers.to_vec()),
            _ => self.iter().map(|it| it.try_into().ok()).collect(),
        }
    }

    /// The elements as numbers of 64 bits.
    pub fn to_u64(&self) -> Vec<u64> {
        match self {
            Numbers::U64(numbers) => numbers.to_vec(),
            _ => self.iter().collect(),
        }
    }

    /// The bits that some element has, whose highest is the highest of any element.
    pub(crate) fn bits(&self) -> u64 {
        match self {
            Numbers::Packed { width, bytes } => bits_of(*width, bytes),
            Numbers::U32(numbers) => numbers.iter().fold(0, |bits, it| bits | it).into(),
            Numbers::U64(numbers) => numbers.iter().fold(0, |bits, it| bits | it),
        }
    }
}

impl PartialEq for Numbers<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.len() == other.len() && self.iter().eq(other.iter())
    }
}

impl Eq for Numbers<'_> {}

impl fmt::Debug for Numbers<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

pub(crate) fn little(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

/// The bits that some element has.
pub(crate) fn bits_of(width: usize, bytes: &[u8]) -> u64 {
    let mut words = bytes.chunks_exact(8);
    let word = |it: &[u8]| it.try_into().map_or(0, u64::from_le_bytes);
    let whole = words.by_ref().fold(0, |bits, it| bits | word(it));
    let rest = words.remainder().chunks(width).fold(0, |bits, it| bits | little(it));
    // Elements of less than a word lie in it side by side.
    let folded = match width {
        1 => (0..8).fold(0, |bits, i| bits | (whole >> (8 * i)) & 0xff),
        2 => (0..4).fold(0, |bits, i| bits | (whole >> (16 * i)) & 0xffff),
        4 => (whole | whole >> 32) & 0xffff_ffff,
        _ => whole,
    };
    folded | rest
}

/// A map by its layout.
#[derive(Clone)]
pub struct Record<'a> {
    layout: &'static Layout,
    values: Vec<Option<Value<'a>>>,
}

impl PartialEq for Record<'_> {
    fn eq(&self, other: &Self) -> bool {
        core::ptr::eq(self.layout, other.layout) && self.values == other.values
    }
}

impl Eq for Record<'_> {}

impl<'a> Record<'a> {
    /// An empty one.
    pub(crate) fn empty(layout: &'static Layout) -> Record<'a> {
        Record { layout, values: layout.fields.iter().map(|_| None).collect() }
    }

    pub(crate) fn made(layout: &'static Layout, values: Vec<Option<Value<'a>>>) -> Record<'a> {
        Record { layout, values }
    }

    pub(crate) fn set(&mut self, place: usize, value: Value<'a>) {
        self.values[place] = Some(value);
    }

    /// The values, if it is a map of this layout.
    pub(crate) fn of(self, layout: &'static Layout) -> Result<Vec<Option<Value<'a>>>> {
        if core::ptr::eq(self.layout, layout) {
            Ok(self.values)
        } else {
            Err(Error::at(ErrorCode::BAD_TYPE, "").between(layout.name, self.layout.name))
        }
    }

    /// What it is a map of.
    pub fn layout(&self) -> &'static Layout {
        self.layout
    }

    /// The value of a field, by the registry's name; none if it is absent.
    pub fn get(&self, name: &str) -> Option<&Value<'a>> {
        self.values.get(self.layout.place(name)?)?.as_ref()
    }

    /// The fields that are there, by ascending id.
    pub fn fields(&self) -> impl Iterator<Item = (&'static Field, &Value<'a>)> + '_ {
        self.layout.fields.iter().zip(&self.values).filter_map(|(field, value)| Some((field, value.as_ref()?)))
    }

    /// The integer or number of an enum in a field.
    pub fn number(&self, name: &str) -> Option<u64> {
        self.get(name)?.number()
    }

    /// The text in a field.
    pub fn text(&self, name: &str) -> Option<&str> {
        match self.get(name)? {
            Value::Text(text) => Some(text),
            _ => None,
        }
    }

    /// The bytes in a field: of a frame, without a copy of them.
    pub fn bytes(&self, name: &str) -> Option<&[u8]> {
        match self.get(name)? {
            Value::Bytes(bytes) => Some(bytes),
            _ => None,
        }
    }

    /// The number array in a field.
    pub fn numbers(&self, name: &str) -> Option<&Numbers<'a>> {
        match self.get(name)? {
            Value::Array(numbers) => Some(numbers),
            _ => None,
        }
    }

    /// The maps in a list.
    pub fn records(&self, name: &str) -> impl Iterator<Item = &Record<'a>> + '_ {
        let values = match self.get(name) {
            Some(Value::List(values)) => values.as_slice(),
            _ => &[],
        };
        values.iter().filter_map(|value| match value {
            Value::Struct(record) => Some(record),
            _ => None,
        })
    }

    /// Refuses values out of their ranges, missing fields and broken rules, in the order of the fields.
    pub(crate) fn check(&self) -> Result<()> {
        for (field, value) in self.fields() {
            check_value(&field.kind, &field.range, value).map_err(|error| error.under(field.name))?;
        }
        self.check_rules()
    }
}

impl fmt::Debug for Record<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut out = f.debug_struct(self.layout.name);
        for (field, value) in self.fields() {
            match (&field.kind, value) {
                _ if field.secret => out.field(field.name, &format_args!("(secret)")),
                (Kind::Enum(it), Value::Uint(number)) if it.name(*number).is_some() => {
                    out.field(field.name, &format_args!("{}", it.name(*number).unwrap_or_default()))
                }
                (_, Value::Uint(number)) => out.field(field.name, number),
                (_, Value::Bytes(bytes)) => out.field(field.name, &format_args!("{}", crate::json::hex(bytes))),
                (_, Value::Text(text)) => out.field(field.name, text),
                (_, Value::Bool(it)) => out.field(field.name, it),
                (_, Value::Array(numbers)) => out.field(field.name, numbers),
                (_, Value::List(values)) => out.field(field.name, values),
                (_, Value::Struct(record)) => out.field(field.name, record),
            };
        }
        out.finish()
    }
}

pub(crate) const ALL: RangeInclusive<u64> = 0..=u64::MAX;

pub(crate) fn in_range(value: u64, range: &RangeInclusive<u64>) -> Result<()> {
    if range.contains(&value) {
        return Ok(());
    }
    let mine = format!("{} to {}", range.start(), range.end());
    Err(Error::at(ErrorCode::OUT_OF_RANGE, "").between(mine, value))
}

/// Whether a length in bytes, or a count of elements, is within the limit of its kind and the range of its field.
pub(crate) fn sized(kind: &Kind, range: &RangeInclusive<u64>, length: usize) -> Result<()> {
    if length as u64 > kind.limit() {
        return Err(Error::at(ErrorCode::TOO_LARGE, "").between(kind.limit(), length));
    }
    in_range(length as u64, range)
}

/// A number of an enum: known, or one that an open enum keeps.
pub(crate) fn enum_value(it: &crate::layout::Enum, number: u64) -> Result<u64> {
    if it.name(number).is_some() {
        return Ok(number);
    }
    in_range(number, &(0..=0xffff))?;
    if it.open {
        return Ok(number);
    }
    Err(Error::at(ErrorCode::UNKNOWN_ENUM_VALUE, "").between("a value of the enum", number))
}

fn check_value(kind: &Kind, range: &RangeInclusive<u64>, value: &Value<'_>) -> Result<()> {
    match (kind, value) {
        (Kind::Uint, Value::Uint(number)) => in_range(*number, range),
        (Kind::Enum(it), Value::Uint(number)) => enum_value(it, *number).map(drop),
        (Kind::Bool, Value::Bool(_)) => Ok(()),
        (Kind::Text, Value::Text(text)) => sized(kind, range, text.len()),
        (Kind::Bytes, Value::Bytes(bytes)) => sized(kind, range, bytes.len()),
        (Kind::Array(widest), Value::Array(numbers)) => {
            let most = u64::MAX >> (64 - (8 << (widest - 1)));
            if numbers.bits() > most {
                let wrong = numbers.iter().position(|it| it > most).unwrap_or(0);
                return refuse::<()>(ErrorCode::OUT_OF_RANGE).map_err(|error| error.index(wrong));
            }
            sized(kind, range, numbers.len())
        }
        (Kind::List(inner), Value::List(values)) => {
            for (i, value) in values.iter().enumerate() {
                check_value(inner, &ALL, value).map_err(|error| error.index(i))?;
            }
            sized(kind, range, values.len())
        }
        (Kind::Struct(_), Value::Struct(record)) => record.check(),
        _ => refuse_at(ErrorCode::BAD_TYPE, ""),
    }
}
