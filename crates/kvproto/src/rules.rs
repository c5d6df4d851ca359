//! Rules of a map, checked at its end (framing.md, Rules).

use crate::enums::ErrorCode;
use crate::error::{refuse_at, Result};
use crate::layout::{Kind, Predicate};
use crate::value::{Record, Value};
use alloc::borrow::ToOwned;
use alloc::collections::BTreeSet;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

/// What elements are compared by.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Key<'a> {
    Number(u64),
    Text(&'a str),
    Bytes(&'a [u8]),
}

impl<'a> Record<'a> {
    /// Refuses a map that lacks a field or breaks a rule.
    pub(crate) fn check_rules(&self) -> Result<()> {
        for field in self.layout().fields.iter().filter(|field| field.required) {
            if self.get(field.name).is_none() {
                return refuse_at(ErrorCode::MISSING_FIELD, field.name);
            }
        }
        for rule in self.layout().rules {
            if let Some(path) = self.broken(&rule.holds) {
                return refuse_at(rule.error, &path);
            }
        }
        Ok(())
    }

    /// Where a predicate does not hold, if so.
    fn broken(&self, predicate: &Predicate) -> Option<String> {
        let at = |field: &str, broken: bool| if broken { Some(field.to_owned()) } else { None };
        match *predicate {
            Predicate::Ascend(list, key) => self.first(list, key, |before, it| before >= it),
            Predicate::Rise(list, key) => self.first(list, key, |before, it| before > it),
            Predicate::Unique(list, key) => {
                let mut seen = BTreeSet::new();
                let twice = self.keys(list, key).into_iter().position(|it| !seen.insert(it))?;
                Some(element(list, key, twice))
            }
            Predicate::Subset(list, whole) => {
                self.get(whole)?;
                let whole: BTreeSet<Key<'_>> = self.keys(whole, None).into_iter().collect();
                let stranger = self.keys(list, None).into_iter().position(|it| !whole.contains(&it))?;
                Some(element(list, None, stranger))
            }
            Predicate::Le(a, b) => at(b, self.number(a)? > self.number(b)?),
            Predicate::Lt(a, b) => at(b, self.number(a)? >= self.number(b)?),
            Predicate::SumLe(a, b, c) => at(c, self.sum(a, b)? > self.number(c)?.into()),
            Predicate::SumAtMost(a, b, most) => at(b, self.sum(a, b)? > most.into()),
            Predicate::SameLength(arrays) => {
                let mut lengths = arrays.iter().filter_map(|name| Some((name, self.numbers(name)?.len())));
                let (_, length) = lengths.next()?;
                lengths.find(|it| it.1 != length).map(|it| (*it.0).to_owned())
            }
            Predicate::PresentIff(field, other, name) => at(field, self.is(other, name)? != self.get(field).is_some()),
            Predicate::OnlyIf(field, other, name) => at(field, !self.is(other, name)? && self.get(field).is_some()),
        }
    }

    fn sum(&self, a: &str, b: &str) -> Option<u128> {
        Some(u128::from(self.number(a)?) + u128::from(self.number(b)?))
    }

    /// Whether an enum has the value of this name; nothing where its value is unknown, and so says nothing.
    fn is(&self, field: &str, name: &str) -> Option<bool> {
        match (&self.layout().fields[self.layout().place(field)?].kind, self.number(field)) {
            (Kind::Enum(it), Some(number)) => Some(it.name(number)? == name),
            _ => Some(false),
        }
    }

    /// The elements of a list, or the named field of each.
    fn keys(&self, list: &str, key: Option<&str>) -> Vec<Key<'_>> {
        match self.get(list) {
            Some(Value::Array(numbers)) => numbers.iter().map(Key::Number).collect(),
            Some(Value::List(values)) => values
                .iter()
                .filter_map(|value| match (value, key) {
                    (Value::Struct(record), Some(key)) => record.get(key).and_then(key_of),
                    _ => key_of(value),
                })
                .collect(),
            _ => Vec::new(),
        }
    }

    /// The first element that stands wrong after the one before it.
    fn first(&self, list: &str, key: Option<&str>, wrong: fn(&Key<'_>, &Key<'_>) -> bool) -> Option<String> {
        let keys = self.keys(list, key);
        let place = keys.windows(2).position(|pair| wrong(&pair[0], &pair[1]))?;
        Some(element(list, key, place + 1))
    }
}

fn key_of<'a>(value: &'a Value<'_>) -> Option<Key<'a>> {
    match value {
        Value::Uint(number) => Some(Key::Number(*number)),
        Value::Text(text) => Some(Key::Text(text)),
        Value::Bytes(bytes) => Some(Key::Bytes(bytes)),
        _ => None,
    }
}

fn element(list: &str, key: Option<&str>, place: usize) -> String {
    let dot = if key.is_some() { "." } else { "" };
    format!("{}[{}]{}{}", list, place, dot, key.unwrap_or(""))
}
