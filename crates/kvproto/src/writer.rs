//! The writer (framing.md, Writer): one form of each message.

use crate::enums::ErrorCode;
use crate::error::{Error, Result};
use crate::facts::MAX_BODY;
use crate::reader::{width, Family};
use crate::value::{Numbers, Record, Value};
use alloc::vec::Vec;

pub(crate) struct Writer {
    out: Vec<u8>,
    /// Entries and elements so far.
    values: u64,
}

impl Writer {
    /// The shortest form of a number or length: what the first byte holds, else that byte and what follows it.
    fn head(&mut self, family: Family, number: u64) {
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
        } else if low | small > 0 && number <= small.into() {
            self.out.push(low | number as u8);
        } else {
            let step = (narrowest..3).find(|step| number >> (8 << step) == 0).unwrap_or(3);
            self.out.push(wide + step);
            self.out.extend_from_slice(&number.to_be_bytes()[8 - (1 << step)..]);
        }
    }

    fn count(&mut self, family: Family, count: usize) {
        self.values += count as u64;
        self.head(family, count as u64);
    }

    fn record(&mut self, record: &Record<'_>) {
        self.count(Family::Map, record.fields().count());
        for (field, value) in record.fields() {
            self.head(Family::Uint, field.id.into());
            self.value(value);
        }
    }

    fn value(&mut self, value: &Value<'_>) {
        match value {
            Value::Uint(number) => self.head(Family::Uint, *number),
            Value::Bool(it) => self.head(Family::Bool, (*it).into()),
            Value::Text(text) => {
                self.head(Family::Text, text.len() as u64);
                self.out.extend_from_slice(text.as_bytes());
            }
            Value::Bytes(bytes) => {
                self.head(Family::Bytes, bytes.len() as u64);
                self.out.extend_from_slice(bytes);
            }
            Value::Array(numbers) => self.array(numbers),
            Value::List(values) => {
                self.count(Family::List, values.len());
                values.iter().for_each(|value| self.value(value));
            }
            Value::Struct(record) => self.record(record),
        }
    }

    /// Little-endian elements of the narrowest width that holds all.
    fn array(&mut self, numbers: &Numbers<'_>) {
        let bits = numbers.bits();
        let code = (1..4).find(|code| bits >> (8 * width(*code)) == 0).unwrap_or(4);
        self.head(Family::Array, (numbers.len() * width(code)) as u64);
        self.out.push(code);
        match (numbers, width(code)) {
            (Numbers::Packed { width, bytes }, size) if *width == size => self.out.extend_from_slice(bytes),
            (Numbers::U32(numbers), 1) => self.out.extend(numbers.iter().map(|it| *it as u8)),
            (Numbers::U32(numbers), 2) => self.all(numbers, |it| (it as u16).to_le_bytes()),
            (Numbers::U32(numbers), 4) => self.all(numbers, u32::to_le_bytes),
            (Numbers::U64(numbers), 8) => self.all(numbers, u64::to_le_bytes),
            (_, size) => numbers.iter().for_each(|it| self.out.extend_from_slice(&it.to_le_bytes()[..size])),
        }
    }

    fn all<T: Copy, const N: usize>(&mut self, numbers: &[T], bytes: impl Fn(T) -> [u8; N]) {
        let begin = self.out.len();
        self.out.resize(begin + N * numbers.len(), 0);
        for (place, it) in self.out[begin..].chunks_exact_mut(N).zip(numbers) {
            place.copy_from_slice(&bytes(*it));
        }
    }
}

/// Appends the body of a map that is known to keep its ranges and rules.
pub(crate) fn append(record: &Record<'_>, out: Vec<u8>) -> Result<Vec<u8>> {
    let begin = out.len();
    let mut writer = Writer { out, values: 0 };
    writer.record(record);
    let (length, most) = ((writer.out.len() - begin) as u64, record.layout().most_values());
    if writer.values > most {
        return Err(Error::at(ErrorCode::TOO_LARGE, "").between(most, writer.values));
    }
    if length > MAX_BODY {
        return Err(Error::at(ErrorCode::TOO_LARGE, "").between(MAX_BODY, length));
    }
    Ok(writer.out)
}

/// The body of a message, or a bare struct.
///
/// # Errors
///
/// What no writer may write: a value out of its range, a missing field, a broken rule; `TOO_LARGE` if it is too long.
pub fn write_body(record: &Record<'_>) -> Result<Vec<u8>> {
    record.check()?;
    append(record, Vec::new())
}
