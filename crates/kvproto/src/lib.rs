//! kvproto is the contract by which LLM prefill and decode engines hand over the KV cache. This crate is what the two
//! compute alike: the codec of its messages, plans with their digests, copy programs and checksums. It has no
//! dependency and no `unsafe`, knows no socket, clock or thread, and needs `core` and `alloc` alone.
//!
//! | to | use |
//! |---|---|
//! | read and write frames | [`decode`], [`encode`], [`Stream`]; without copies, [`read_frame`] |
//! | state what a replica owns | [`Description`] |
//! | find who sends what to whom | [`Plan`] |
//! | find which bytes go where | [`RankLayout`], [`CopyProgram`] |
//! | deal tokens over ranks | [`Group`] |
//! | agree on version and features | [`negotiate`] |
//! | read tickets, in JSON | [`json`] |
//!
//! An [`Error`] has the code and the path that every implementation gives for the same fault. Clauses and pages that
//! are named here are those of the specification.
#![no_std]
#![forbid(unsafe_code)]
#![warn(missing_docs, missing_debug_implementations, rust_2018_idioms)]

extern crate alloc;
#[cfg(feature = "std")]
extern crate std;

mod body;
mod deals;
mod description;
mod elect;
#[rustfmt::skip]
mod enums;
mod error;
#[rustfmt::skip]
mod facts;
mod frame;
mod inline;
pub mod json;
mod late;
mod layout;
mod lowering;
#[rustfmt::skip]
pub mod messages;
mod negotiation;
mod plan;
mod pool;
mod reader;
mod rules;
mod sha256;
mod value;
mod writer;

pub use body::Body;
pub use description::{Description, Group};
pub use enums::*;
pub use error::{Error, Result};
pub use facts::*;
pub use frame::{decode, decode_struct, encode, encode_struct, read_frame, write_frame, Stream};
pub use inline::{Credit, Inline};
pub use layout::{Enum, Field, Kind, Layout};
pub use lowering::{CopyProgram, Run, Side};
pub use messages::Message;
pub use negotiation::{negotiate, Agreement, Terms, Versions};
pub use plan::{Plan, Route, RouteBox};
pub use pool::RankLayout;
pub use reader::read_body;
pub use value::{Numbers, Record, Value};
pub use writer::write_body;

#[doc = include_str!("../README.md")]
#[cfg(doctest)]
struct Readme;
