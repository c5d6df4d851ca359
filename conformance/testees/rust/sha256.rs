//! SHA-256, of FIPS 180-4.

/// The first 32 bits of what the roots of the first primes have after the point; `cube`: of the third roots.
fn roots(count: usize, cube: bool) -> Vec<u32> {
    let prime = |n: &u128| (2..*n).all(|d| n % d != 0);
    let root = |n: u128| {
        // The greatest r with r^2 <= n 2^64, or r^3 <= n 2^96: the root times 2^32.
        let fits = |r: u128| if cube { r * r * r <= n << 96 } else { r * r <= n << 64 };
        (0..36).rev().fold(0u128, |r, bit| if fits(r | 1 << bit) { r | 1 << bit } else { r }) as u32
    };
    (2..).filter(prime).take(count).map(root).collect()
}

pub fn sha256(data: &[u8]) -> [u8; 32] {
    let mut state = roots(8, false);
    let k = roots(64, true);
    let mut padded = data.to_vec();
    padded.push(0x80);
    padded.resize((padded.len() + 8 + 63) / 64 * 64, 0);
    let end = padded.len() - 8;
    padded[end..].copy_from_slice(&(data.len() as u64 * 8).to_be_bytes());
    for block in padded.chunks(64) {
        let mut w: Vec<u32> = block.chunks(4).map(|it| u32::from_be_bytes([it[0], it[1], it[2], it[3]])).collect();
        for i in 16..64 {
            let s0 = w[i - 15].rotate_right(7) ^ w[i - 15].rotate_right(18) ^ (w[i - 15] >> 3);
            let s1 = w[i - 2].rotate_right(17) ^ w[i - 2].rotate_right(19) ^ (w[i - 2] >> 10);
            w.push(w[i - 16].wrapping_add(s0).wrapping_add(w[i - 7]).wrapping_add(s1));
        }
        let mut v = state.clone();
        for i in 0..64 {
            let s1 = v[4].rotate_right(6) ^ v[4].rotate_right(11) ^ v[4].rotate_right(25);
            let ch = (v[4] & v[5]) ^ (!v[4] & v[6]);
            let t1 = v[7].wrapping_add(s1).wrapping_add(ch).wrapping_add(k[i]).wrapping_add(w[i]);
            let s0 = v[0].rotate_right(2) ^ v[0].rotate_right(13) ^ v[0].rotate_right(22);
            let maj = (v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]);
            v.rotate_right(1);
            v[4] = v[4].wrapping_add(t1);
            v[0] = t1.wrapping_add(s0).wrapping_add(maj);
        }
        state.iter_mut().zip(v).for_each(|(s, v)| *s = s.wrapping_add(v));
    }
    let mut out = [0; 32];
    out.chunks_mut(4).zip(state).for_each(|(bytes, word)| bytes.copy_from_slice(&word.to_be_bytes()));
    out
}
