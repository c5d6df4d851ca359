//! SHA-256, of FIPS 180-4.

/// The first 32 bits of what the roots of the first primes have after the point; `cube`: of the third roots.
const fn roots<const N: usize>(cube: bool) -> [u32; N] {
    let (mut out, mut count, mut n) = ([0; N], 0, 2u128);
    while count < N {
        let mut d = 2;
        while n % d != 0 {
            d += 1;
        }
        if d == n {
            // The greatest r with r^2 <= n 2^64, or r^3 <= n 2^96: the root times 2^32.
            let (mut r, mut bit) = (0u128, 36);
            while bit > 0 {
                bit -= 1;
                let next = r | 1 << bit;
                if if cube { next * next * next <= n << 96 } else { next * next <= n << 64 } {
                    r = next;
                }
            }
            out[count] = r as u32;
            count += 1;
        }
        n += 1;
    }
    out
}

const START: [u32; 8] = roots(false);
const K: [u32; 64] = roots(true);

/// A digest under way.
pub(crate) struct Sha256 {
    state: [u32; 8],
    block: [u8; 64],
    length: u64,
}

impl Sha256 {
    pub(crate) fn new() -> Sha256 {
        Sha256 { state: START, block: [0; 64], length: 0 }
    }

    pub(crate) fn of(data: &[u8]) -> [u8; 32] {
        let mut digest = Sha256::new();
        digest.update(data);
        digest.finish()
    }

    pub(crate) fn update(&mut self, mut data: &[u8]) {
        while !data.is_empty() {
            let held = (self.length % 64) as usize;
            let (now, later) = data.split_at(data.len().min(64 - held));
            self.block[held..held + now.len()].copy_from_slice(now);
            self.length += now.len() as u64;
            if held + now.len() == 64 {
                self.compress();
            }
            data = later;
        }
    }

    pub(crate) fn finish(mut self) -> [u8; 32] {
        let bits = (self.length * 8).to_be_bytes();
        let zeros = (119 - self.length % 64) % 64;
        self.update(&[0x80]);
        self.update(&[0; 64][..zeros as usize]);
        self.update(&bits);
        let mut out = [0; 32];
        out.chunks_mut(4).zip(self.state).for_each(|(bytes, word)| bytes.copy_from_slice(&word.to_be_bytes()));
        out
    }

    fn compress(&mut self) {
        let mut w = [0u32; 64];
        for (word, it) in w.iter_mut().zip(self.block.chunks_exact(4)) {
            *word = u32::from_be_bytes([it[0], it[1], it[2], it[3]]);
        }
        for i in 16..64 {
            let s0 = w[i - 15].rotate_right(7) ^ w[i - 15].rotate_right(18) ^ (w[i - 15] >> 3);
            let s1 = w[i - 2].rotate_right(17) ^ w[i - 2].rotate_right(19) ^ (w[i - 2] >> 10);
            w[i] = w[i - 16].wrapping_add(s0).wrapping_add(w[i - 7]).wrapping_add(s1);
        }
        let [mut a, mut b, mut c, mut d, mut e, mut f, mut g, mut h] = self.state;
        for (k, w) in K.iter().zip(w) {
            let s1 = e.rotate_right(6) ^ e.rotate_right(11) ^ e.rotate_right(25);
            let t1 = h.wrapping_add(s1).wrapping_add((e & f) ^ (!e & g)).wrapping_add(*k).wrapping_add(w);
            let s0 = a.rotate_right(2) ^ a.rotate_right(13) ^ a.rotate_right(22);
            let t2 = s0.wrapping_add((a & b) ^ (a & c) ^ (b & c));
            (h, g, f, e) = (g, f, e, d.wrapping_add(t1));
            (d, c, b, a) = (c, b, a, t1.wrapping_add(t2));
        }
        let state = self.state.iter_mut().zip([a, b, c, d, e, f, g, h]);
        state.for_each(|(s, v)| *s = s.wrapping_add(v));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::json::hex;

    /// The examples of FIPS 180-4, and lengths about the end of a block.
    #[test]
    fn digests_are_those_of_the_standard() {
        let empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        let abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        let two_blocks = "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1";
        assert_eq!(hex(&Sha256::of(b"")), empty);
        assert_eq!(hex(&Sha256::of(b"abc")), abc);
        assert_eq!(hex(&Sha256::of(b"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq")), two_blocks);
    }

    #[test]
    fn pieces_and_the_whole_have_one_digest() {
        let data = [7u8; 200];
        for length in 0..200 {
            let mut digest = Sha256::new();
            digest.update(&data[..length / 3]);
            digest.update(&data[length / 3..length]);
            assert_eq!(digest.finish(), Sha256::of(&data[..length]));
        }
    }
}
