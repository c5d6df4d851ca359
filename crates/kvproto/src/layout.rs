//! What the registry says of messages, structs and enums, as values.

use crate::enums::ErrorCode;
use core::ops::RangeInclusive;

/// A message, or a struct, whose id is 0: its fields by ascending id, and its rules.
#[derive(Debug)]
pub struct Layout {
    /// Name in the registry.
    pub name: &'static str,
    /// Message type in the envelope; 0: a struct.
    pub id: u16,
    /// Major version in the envelope.
    pub major: u8,
    /// Fields, by ascending id.
    pub fields: &'static [Field],
    pub(crate) rules: &'static [Rule],
}

impl Layout {
    /// The message or struct of this name.
    pub fn named(name: &str) -> Option<&'static Layout> {
        let all = crate::facts::MESSAGES.iter().chain(crate::facts::STRUCTS);
        all.copied().find(|layout| layout.name == name)
    }

    pub(crate) fn place(&self, name: &str) -> Option<usize> {
        self.fields.iter().position(|field| field.name == name)
    }

    /// Entries and elements that a body may have in all; a bare struct may have any number.
    pub(crate) fn most_values(&self) -> u64 {
        if self.id == 0 {
            u64::MAX
        } else {
            crate::facts::MAX_VALUES
        }
    }
}

/// A field of a message or struct.
#[derive(Debug)]
pub struct Field {
    /// Id on the wire.
    pub id: u16,
    /// Name in the registry.
    pub name: &'static str,
    /// Whether it must be there.
    pub required: bool,
    /// Whether its value is kept out of what people read.
    pub secret: bool,
    /// Type.
    pub kind: Kind,
    /// Least and greatest number, length in bytes, or count of elements.
    pub range: RangeInclusive<u64>,
}

/// The type of a value.
#[derive(Debug)]
pub enum Kind {
    /// Unsigned integer.
    Uint,
    /// Truth value.
    Bool,
    /// UTF-8.
    Text,
    /// Bytes.
    Bytes,
    /// Value of an enum.
    Enum(&'static Enum),
    /// Number array, by the code of its widest element: 1, 2, 3 or 4 for 1, 2, 4 or 8 bytes.
    Array(u8),
    /// List of values of one type.
    List(&'static Kind),
    /// Map.
    Struct(&'static Layout),
}

impl Kind {
    /// The most bytes or elements of any value of this kind.
    pub(crate) fn limit(&self) -> u64 {
        match self {
            Kind::Text => crate::facts::MAX_STRING,
            Kind::Bytes => crate::facts::MAX_BYTES,
            Kind::Array(_) => crate::facts::MAX_ARRAY,
            Kind::List(_) => crate::facts::MAX_LIST,
            _ => u64::MAX,
        }
    }
}

/// An enum: whether unknown numbers are kept, and the names of those that are known.
#[derive(Debug)]
pub struct Enum {
    /// Whether a reader keeps unknown numbers.
    pub open: bool,
    pub(crate) values: &'static [(u64, &'static str)],
}

impl Enum {
    /// The name of a number.
    pub fn name(&self, value: u64) -> Option<&'static str> {
        self.values.iter().find(|row| row.0 == value).map(|row| row.1)
    }

    /// The number of a name.
    pub fn value(&self, name: &str) -> Option<u64> {
        self.values.iter().find(|row| row.1 == name).map(|row| row.0)
    }
}

#[derive(Debug)]
pub(crate) struct Rule {
    pub holds: Predicate,
    pub error: ErrorCode,
}

/// A predicate of framing.md, with the fields that it is about.
#[derive(Debug)]
pub(crate) enum Predicate {
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

/// Defines the type of an enum whose unknown numbers are kept.
macro_rules! open_enum {
    ($(#[$doc:meta])* $name:ident: facts::$table:ident { $($(#[$note:meta])* $word:ident = $number:literal,)* }) => {
        $(#[$doc])*
        ///
        /// Open: a number that has no name here is kept.
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub u16);

        impl $name {
            $($(#[$note])* pub const $word: $name = $name($number);)*

            /// The name, if the number has one.
            pub fn name(self) -> Option<&'static str> {
                facts::$table.name(self.0.into())
            }

            /// The value of this name.
            pub fn named(name: &str) -> Option<$name> {
                facts::$table.value(name).and_then($name::of)
            }

            pub(crate) fn of(number: u64) -> Option<$name> {
                number.try_into().ok().map($name)
            }

            pub(crate) fn number(self) -> u64 {
                self.0.into()
            }
        }

        crate::layout::shown!($name);
    };
}

/// Defines the type of an enum whose unknown numbers are refused.
macro_rules! closed_enum {
    ($(#[$doc:meta])* $name:ident: facts::$table:ident { $($(#[$note:meta])* $word:ident = $number:literal,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum $name {
            $($(#[$note])* $word = $number,)*
        }

        impl $name {
            /// The name in the registry.
            pub fn name(self) -> Option<&'static str> {
                facts::$table.name(self.number())
            }

            /// The value of this name in the registry.
            pub fn named(name: &str) -> Option<$name> {
                facts::$table.value(name).and_then($name::of)
            }

            pub(crate) fn of(number: u64) -> Option<$name> {
                match number {
                    $($number => Some($name::$word),)*
                    _ => None,
                }
            }

            pub(crate) fn number(self) -> u64 {
                self as u64
            }
        }

        crate::layout::shown!($name);
    };
}

/// Defines how an enum is printed, read and written.
macro_rules! shown {
    ($name:ident) => {
        impl core::fmt::Display for $name {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                match self.name() {
                    Some(name) => f.write_str(name),
                    None => write!(f, "{}", self.number()),
                }
            }
        }

        impl core::fmt::Debug for $name {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                core::fmt::Display::fmt(self, f)
            }
        }

        impl crate::body::Form for $name {
            fn take(value: Option<crate::value::Value<'_>>) -> Option<$name> {
                $name::of(value?.number()?)
            }

            fn give(&self) -> Option<crate::value::Value<'_>> {
                Some(crate::value::Value::Uint(self.number()))
            }
        }

        impl crate::body::Element for $name {}
    };
}

pub(crate) use {closed_enum, open_enum, shown};
