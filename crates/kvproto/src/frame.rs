//! Frames: an envelope and a body (framing.md), alone or one after the other in a byte stream.

use crate::body::Body;
use crate::enums::ErrorCode;
use crate::error::{Error, Result};
use crate::facts::{HEADER, MAGIC, MAJOR, MAX_BODY, MESSAGES, MINOR};
use crate::layout::Layout;
use crate::messages::Message;
use crate::reader::read_body;
use crate::value::{little, Record};
use crate::writer::append;
use alloc::format;
use alloc::vec::Vec;

/// Reads a frame.
///
/// # Errors
///
/// The first thing that a strict reader refuses; a path that begins with `@` is one of the envelope.
///
/// ```
/// use kvproto::messages::Message;
///
/// let frame = b"KVPW\x01\x00\x07\x02\x00\x00\x00\x00\x07\x00\x00\x00\x83\x01\x05\x02\x06\x03\x01";
/// match kvproto::decode(frame) {
///     Ok(Message::Abort(it)) => println!("{}", it.sequence),
///     Ok(other) => println!("{other:?}"),
///     Err(error) => println!("{error}"),
/// }
/// ```
pub fn decode(frame: &[u8]) -> Result<Message> {
    Message::from_record(read_frame(frame)?)
}

/// The frame of a message.
///
/// # Errors
///
/// What no writer may write: a value out of its range, or a broken rule; `TOO_LARGE` if the body is too long.
pub fn encode<T: Body>(message: &T) -> Result<Vec<u8>> {
    write_frame(&message.to_record())
}

/// Reads a bare struct, as in the `geometry` of Describe.
///
/// # Errors
///
/// The first thing that a strict reader refuses.
pub fn decode_struct<T: Body>(bytes: &[u8]) -> Result<T> {
    T::from_record(read_body(T::layout(), bytes)?)
}

/// The bytes of a bare struct.
///
/// # Errors
///
/// As those of [`encode`].
pub fn encode_struct<T: Body>(value: &T) -> Result<Vec<u8>> {
    crate::writer::write_body(&value.to_record())
}

impl Message {
    /// The frame of any message.
    ///
    /// # Errors
    ///
    /// As those of [`encode`].
    pub fn encode(&self) -> Result<Vec<u8>> {
        write_frame(&self.to_record())
    }
}

/// Reads a frame into a map that borrows from it: the data of a Data, or the items of grants, are not copied.
///
/// # Errors
///
/// As those of [`decode`].
pub fn read_frame(frame: &[u8]) -> Result<Record<'_>> {
    let layout = read_envelope(frame)?;
    let (body, length) = (&frame[HEADER..], little(&frame[12..16]));
    let wrong = match (body.len() as u64).cmp(&length) {
        core::cmp::Ordering::Less => ErrorCode::TRUNCATED,
        core::cmp::Ordering::Greater => ErrorCode::TRAILING_BYTES,
        core::cmp::Ordering::Equal => return read_body(layout, body),
    };
    Err(Error::at(wrong, "@length").between(format!("a body of {}", length), body.len()))
}

/// The frame of a map.
///
/// # Errors
///
/// As those of [`encode`]; `UNKNOWN_MESSAGE` if it is a struct.
pub fn write_frame(record: &Record<'_>) -> Result<Vec<u8>> {
    let layout = record.layout();
    if layout.id == 0 {
        return Err(Error::at(ErrorCode::UNKNOWN_MESSAGE, "").between("a message", layout.name));
    }
    record.check()?;
    let minor = if layout.major == MAJOR { MINOR } else { 0 };
    let id = layout.id.to_le_bytes();
    let mut frame = [&MAGIC[..], &[layout.major, minor, id[0], id[1], 0, 0, 0, 0], &[0; 4]].concat();
    frame = append(record, frame)?;
    let length = (frame.len() - HEADER) as u32;
    frame[12..HEADER].copy_from_slice(&length.to_le_bytes());
    Ok(frame)
}

/// The layout that an envelope names, of what may be less than a frame or more.
fn read_envelope(frame: &[u8]) -> Result<&'static Layout> {
    let refused = |code, path, mine: &str, yours: u64| Err(Error::at(code, path).between(mine, yours));
    if lost(frame) {
        return Err(Error::at(ErrorCode::BAD_MAGIC, "@magic").between("KVPW", "other bytes"));
    }
    if frame.len() < HEADER {
        return refused(ErrorCode::TRUNCATED, "@length", "16 bytes of envelope", frame.len() as u64);
    }
    let major = frame[4];
    if major != 0 && major != MAJOR {
        return refused(ErrorCode::UNSUPPORTED_VERSION, "@major", "0 or 1", major.into());
    }
    let id = little(&frame[6..8]);
    let layout = match MESSAGES.iter().find(|layout| u64::from(layout.id) == id) {
        Some(layout) => *layout,
        None => return refused(ErrorCode::UNKNOWN_MESSAGE, "@type", "a type of the registry", id),
    };
    if major != layout.major {
        return refused(ErrorCode::UNSUPPORTED_VERSION, "@major", &format!("{}", layout.major), major.into());
    }
    if frame[8] != 0 {
        return refused(ErrorCode::UNKNOWN_FLAG, "@flags", "0", frame[8].into());
    }
    let length = little(&frame[12..16]);
    if length > MAX_BODY {
        return refused(ErrorCode::TOO_LARGE, "@length", &format!("{}", MAX_BODY), length);
    }
    Ok(layout)
}

/// Whether these are not the first bytes of a frame.
fn lost(bytes: &[u8]) -> bool {
    bytes.iter().zip(MAGIC).any(|(a, b)| *a != b)
}

/// A byte stream that is cut into frames, wherever its pieces end.
///
/// A frame that is refused does not end it, but for a magic that is none: after that, no frame can be found any more. It
/// holds no more than one frame and one piece.
#[derive(Clone, Debug, Default)]
pub struct Stream {
    held: Vec<u8>,
    /// Bytes still to come of a frame that was too long to hold.
    passing: u64,
    ended: bool,
}

impl Stream {
    /// Takes a piece, and gives each frame that it completes to `frame`, read or refused.
    pub fn feed(&mut self, piece: &[u8], mut frame: impl FnMut(Result<Record<'_>>)) {
        let passed = self.passing.min(piece.len() as u64);
        self.passing -= passed;
        if self.ended {
            return;
        }
        self.held.extend_from_slice(&piece[passed as usize..]);
        let mut at = 0;
        while !self.ended && at < self.held.len() {
            let rest = &self.held[at..];
            let lost = lost(rest);
            if !lost && rest.len() < HEADER {
                break;
            }
            let body = if lost { 0 } else { little(&rest[12..16]) };
            let whole = (rest.len() as u64).min(HEADER as u64 + body);
            if body <= MAX_BODY && whole < HEADER as u64 + body && !lost {
                break;
            }
            frame(read_frame(&rest[..whole as usize]));
            self.ended = lost;
            self.passing = if lost { 0 } else { HEADER as u64 + body - whole };
            at += whole as usize;
        }
        self.held.drain(..at);
    }

    /// Whether bytes came that are no frame, so that nothing can be read any more.
    pub fn ended(&self) -> bool {
        self.ended
    }
}
