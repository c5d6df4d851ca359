//! What two sides agree on without a plan: version and features (negotiation.md), and what becomes of Data
//! (transfers.md, Inline).

use crate::codec::{commas, refuse_at, result, uint_from_json, Json, Result};
use crate::{each, list, some, uints};

struct Terms {
    /// Major, lowest and highest minor.
    versions: Vec<(u64, u64, u64)>,
    offered: Vec<u64>,
    needed: Vec<u64>,
}

impl Terms {
    fn read(json: &Json) -> Option<Terms> {
        let range = |json: &Json| {
            let (major, minors) = json.text()?.split_once('.')?;
            let (lowest, highest) = minors.split_once('-')?;
            Some((major.parse().ok()?, lowest.parse().ok()?, highest.parse().ok()?))
        };
        Some(Terms {
            versions: list(json.get("versions")?)?.iter().map(range).collect::<Option<_>>()?,
            offered: uints(json.get("offered")?)?,
            needed: uints(json.get("needed")?)?,
        })
    }
}

pub fn negotiate(question: &Json) -> Option<String> {
    let (sink, source) = (Terms::read(question.get("sink")?)?, Terms::read(question.get("source")?)?);
    Some(result(chosen(&sink, &source), |((major, minor), features), out| {
        let features = each(&features, |feature| some(Some(feature)));
        out.push_str(&format!("\"version\": \"{major}.{minor}\", \"features\": {features}"));
    }))
}

type Chosen = ((u64, u64), Vec<u64>);

fn chosen(sink: &Terms, source: &Terms) -> Result<Chosen> {
    let common = sink.versions.iter().find_map(|(major, lowest, highest)| {
        let meets = |it: &&(u64, u64, u64)| it.0 == *major && it.1 <= *highest && *lowest <= it.2;
        source.versions.iter().find(meets).map(|it| (*major, it.2.min(*highest)))
    });
    let version = match common {
        Some(version) => version,
        None => return refuse_at("NO_VERSION", "versions"),
    };
    if sink.needed.iter().any(|feature| !source.offered.contains(feature)) {
        return refuse_at("FEATURE_MISSING", "needed");
    }
    if source.needed.iter().any(|feature| !sink.offered.contains(feature)) {
        return refuse_at("FEATURE_MISSING", "offered");
    }
    let mut both: Vec<u64> = sink.offered.iter().filter(|feature| source.offered.contains(feature)).copied().collect();
    both.sort_unstable();
    Ok((version, both))
}

/// What a sink makes of the Data of one stream.
pub fn inline(question: &Json) -> Option<String> {
    let number = |key: &str| uint_from_json(question.get(key)?).ok();
    let (length, total) = (number("length")?, number("total")?);
    let (mut unpacked, mut counted, mut refused) = (0u64, 0u64, None);
    for (i, one) in list(question.get("data")?)?.iter().enumerate() {
        let one = list(one)?;
        let (offset, bytes) = (uint_from_json(one.get(0)?).ok()?, uint_from_json(one.get(1)?).ok()?);
        let last = one.get(2)?.text() == Some("true");
        let wrong = if bytes > total - counted {
            Some(("CREDIT", "data"))
        } else {
            counted += bytes;
            if offset != unpacked || bytes > length - unpacked {
                Some(("OUT_OF_RANGE", "offset"))
            } else if last != (unpacked + bytes == length) {
                Some(("FIELD_CONFLICT", "last"))
            } else {
                None
            }
        };
        match wrong {
            // What comes of a transfer that has ended is counted and dropped.
            _ if refused.is_some() => (),
            Some((code, path)) => refused = Some([i.to_string(), code.to_string(), path.to_string()]),
            None => unpacked += bytes,
        }
    }
    let mut out = format!("\"unpacked\": \"{unpacked}\", \"counted\": \"{counted}\"");
    if let Some(refused) = refused {
        out.push_str(", \"refused\": [");
        commas(&mut out, refused.iter(), |out, word| out.push_str(&format!("\"{word}\"")));
        out.push(']');
    }
    Some(out)
}
