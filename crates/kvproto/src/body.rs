//! How the types of messages and structs become values of the codec, and come of them.

use crate::error::Result;
use crate::layout::Layout;
use crate::value::{Numbers, Record, Value};
use alloc::string::String;
use alloc::vec::Vec;

/// A message or struct of the registry.
pub trait Body: Sized {
    /// Its fields and rules.
    fn layout() -> &'static Layout;

    /// The typed form of a map that has been read.
    ///
    /// # Errors
    ///
    /// `BAD_TYPE` if it is a map of another layout.
    fn from_record(record: Record<'_>) -> Result<Self>;

    /// A view of it as a map, which borrows texts, bytes and numbers, and whose ranges and rules are not checked.
    fn to_record(&self) -> Record<'_>;
}

/// What a field may be.
pub(crate) trait Form: Sized {
    fn take(value: Option<Value<'_>>) -> Option<Self>;
    fn give(&self) -> Option<Value<'_>>;
}

/// What a list may have as elements.
pub(crate) trait Element: Form {}

impl<T: Form> Form for Option<T> {
    fn take(value: Option<Value<'_>>) -> Option<Self> {
        match value {
            None => Some(None),
            some => T::take(some).map(Some),
        }
    }

    fn give(&self) -> Option<Value<'_>> {
        self.as_ref()?.give()
    }
}

macro_rules! unsigned {
    ($($type:ty)*) => {$(
        impl Form for $type {
            fn take(value: Option<Value<'_>>) -> Option<Self> {
                value?.number()?.try_into().ok()
            }

            fn give(&self) -> Option<Value<'_>> {
                Some(Value::Uint((*self).into()))
            }
        }
    )*};
}

unsigned! { u8 u16 u32 u64 }

impl Form for bool {
    fn take(value: Option<Value<'_>>) -> Option<Self> {
        match value? {
            Value::Bool(it) => Some(it),
            _ => None,
        }
    }

    fn give(&self) -> Option<Value<'_>> {
        Some(Value::Bool(*self))
    }
}

impl Form for String {
    fn take(value: Option<Value<'_>>) -> Option<Self> {
        match value? {
            Value::Text(text) => Some(text.into_owned()),
            _ => None,
        }
    }

    fn give(&self) -> Option<Value<'_>> {
        Some(Value::Text(self.as_str().into()))
    }
}

impl Element for String {}

impl Form for Vec<u8> {
    fn take(value: Option<Value<'_>>) -> Option<Self> {
        match value? {
            Value::Bytes(bytes) => Some(bytes.into_owned()),
            _ => None,
        }
    }

    fn give(&self) -> Option<Value<'_>> {
        Some(Value::Bytes(self.as_slice().into()))
    }
}

impl Element for Vec<u8> {}

impl<const N: usize> Form for [u8; N] {
    fn take(value: Option<Value<'_>>) -> Option<Self> {
        match value? {
            Value::Bytes(bytes) => bytes.as_ref().try_into().ok(),
            _ => None,
        }
    }

    fn give(&self) -> Option<Value<'_>> {
        Some(Value::Bytes(self.as_slice().into()))
    }
}

impl Form for Vec<u32> {
    fn take(value: Option<Value<'_>>) -> Option<Self> {
        match value? {
            Value::Array(numbers) => numbers.to_u32(),
            _ => None,
        }
    }

    fn give(&self) -> Option<Value<'_>> {
        Some(Value::Array(Numbers::U32(self)))
    }
}

impl Form for Vec<u64> {
    fn take(value: Option<Value<'_>>) -> Option<Self> {
        match value? {
            Value::Array(numbers) => Some(numbers.to_u64()),
            _ => None,
        }
    }

    fn give(&self) -> Option<Value<'_>> {
        Some(Value::Array(Numbers::U64(self.as_slice().into())))
    }
}

impl<T: Element> Form for Vec<T> {
    fn take(value: Option<Value<'_>>) -> Option<Self> {
        match value? {
            Value::List(values) => values.into_iter().map(|value| T::take(Some(value))).collect(),
            _ => None,
        }
    }

    fn give(&self) -> Option<Value<'_>> {
        Some(Value::List(self.iter().filter_map(Form::give).collect()))
    }
}

/// Defines the type of a message or struct.
macro_rules! body {
    ($(#[$doc:meta])* $name:ident: facts::$table:ident { $($(#[$note:meta])* $field:ident: $type:ty,)* }) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq)]
        pub struct $name {
            $($(#[$note])* pub $field: $type,)*
        }

        impl crate::body::Body for $name {
            fn layout() -> &'static crate::layout::Layout {
                &facts::$table
            }

            fn from_record(record: crate::value::Record<'_>) -> crate::error::Result<Self> {
                let mut values = record.of(Self::layout())?.into_iter();
                Ok($name {
                    $($field: crate::body::field(stringify!($field), values.next())?,)*
                })
            }

            fn to_record(&self) -> crate::value::Record<'_> {
                let values = alloc::vec![$(crate::body::Form::give(&self.$field)),*];
                crate::value::Record::made(Self::layout(), values)
            }
        }

        impl crate::body::Form for $name {
            fn take(value: Option<crate::value::Value<'_>>) -> Option<Self> {
                match value? {
                    crate::value::Value::Struct(record) => crate::body::Body::from_record(record).ok(),
                    _ => None,
                }
            }

            fn give(&self) -> Option<crate::value::Value<'_>> {
                Some(crate::value::Value::Struct(crate::body::Body::to_record(self)))
            }
        }

        impl crate::body::Element for $name {}

        impl core::fmt::Debug for $name {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                core::fmt::Debug::fmt(&crate::body::Body::to_record(self), f)
            }
        }
    };
}

/// Defines the type of any message.
macro_rules! messages {
    ($($name:ident),*) => {
        /// Any message.
        #[derive(Clone, Debug, PartialEq, Eq)]
        #[non_exhaustive]
        pub enum Message {
            $(#[doc = concat!("[`", stringify!($name), "`].")] $name($name),)*
        }

        impl Message {
            /// The typed form of a message that has been read.
            ///
            /// # Errors
            ///
            /// `UNKNOWN_MESSAGE` if it is a struct.
            pub fn from_record(record: crate::value::Record<'_>) -> crate::error::Result<Message> {
                use crate::body::Body;
                $(if core::ptr::eq(record.layout(), $name::layout()) {
                    return $name::from_record(record).map(Message::$name);
                })*
                Err(crate::error::Error::at(ErrorCode::UNKNOWN_MESSAGE, "").between("a message", record.layout().name))
            }

            /// A view of it as a map.
            pub fn to_record(&self) -> crate::value::Record<'_> {
                match self {
                    $(Message::$name(it) => crate::body::Body::to_record(it),)*
                }
            }
        }

        $(impl From<$name> for Message {
            fn from(it: $name) -> Message {
                Message::$name(it)
            }
        })*
    };
}

pub(crate) fn field<T: Form>(name: &str, value: Option<Option<Value<'_>>>) -> Result<T> {
    T::take(value.flatten()).ok_or_else(|| crate::error::Error::at(crate::ErrorCode::BAD_TYPE, name))
}

pub(crate) use {body, messages};
