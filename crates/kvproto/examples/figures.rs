//! Work of the crate, over and over, for whoever measures it (benchmarks/crate.py): `figures WHAT TIMES`. What it works on
//! comes as lines of hex on stdin: a frame, or the Descriptions of a source and a sink.

use kvproto::json::from_hex;
use kvproto::{decode, read_frame, Description, Plan};
use std::io::BufRead;

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let (what, times) = (arguments[1].as_str(), arguments[2].parse::<u64>().expect("a number of times"));
    let lines = std::io::stdin().lock().lines();
    let given: Vec<Vec<u8>> = lines.map(|line| from_hex(&line.expect("a line")).expect("hex")).collect();
    let done: usize = match what {
        "decode" => repeat(times, || decode(&given[0]).is_ok()),
        "read" => repeat(times, || read_frame(&given[0]).is_ok()),
        "encode" => {
            let message = decode(&given[0]).expect("a frame");
            repeat(times, || message.encode().is_ok())
        }
        "describe" => repeat(times, || Description::decode(&given[0]).is_ok()),
        "plan" => {
            let sides: Vec<Description> = given.iter().map(|it| Description::decode(it).expect("a side")).collect();
            repeat(times, || Plan::new(&sides[0], &sides[1], &[]).is_ok())
        }
        _ => panic!("decode, read, encode, describe or plan"),
    };
    println!("{done}");
}

/// How often it went well.
fn repeat(times: u64, work: impl Fn() -> bool) -> usize {
    (0..times).filter(|_| work()).count()
}
