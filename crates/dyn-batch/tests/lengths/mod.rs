//! Sequence lengths that look like those of real corpora, from a recipe of a few numbers.
//!
//! A distribution is a table of knots of its quantile function, linear in between; its draws come from SplitMix64. The
//! shapes follow published statistics of web documents, and of the questions and contexts of `SQuAD`. No text of either
//! is in here.

#![allow(clippy::expect_used, reason = "a recipe with a typo is a failed test")]
#![allow(unreachable_pub, reason = "other packages' tests and benches include this file as a public module")]

/// A distribution of lengths, and the seed of its draws.
#[derive(Debug)]
pub struct Recipe {
    seed: u64,
    /// Pairs of a quantile, times 2^32, and the length there.
    knots: &'static str,
}

impl Recipe {
    /// Returns the first `n` draws.
    ///
    /// # Panics
    ///
    /// If the recipe has a typo.
    #[must_use]
    pub fn draw(&self, n: u64) -> Vec<u32> {
        let knots: Vec<_> = self.knots.split(' ').map(knot).collect();
        (1..=n).map(|i| quantile(&knots, mix(self.seed.wrapping_add(i.wrapping_mul(GOLDEN_GAMMA))) >> 32)).collect()
    }
}

fn knot(text: &str) -> (u64, u64) {
    let (p, length) = text.split_once(':').expect("a knot is p:length");
    (p.parse().expect("p is a number"), length.parse().expect("so is the length"))
}

fn quantile(knots: &[(u64, u64)], u: u64) -> u32 {
    let above = knots.partition_point(|&(p, _)| p <= u);
    let [(p0, from), (p1, to)] = [knots[above - 1], knots[above]];
    u32::try_from(from + (to - from + 1) * (u - p0) / (p1 - p0)).expect("lengths are small")
}

const GOLDEN_GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Web documents in tokens: lognormal, median 430, sigma 1.05, clipped to 8..=8192.
pub const WEB: Recipe = Recipe {
    seed: 101,
    knots: "\
        0:8 2147484:14 8589935:21 21474836:29 42949673:37 85899346:50 150323855:64 214748365:77 322122547:95 \
        429496730:112 536870912:129 644245094:145 751619277:161 858993459:178 966367642:195 1073741824:212 \
        1181116006:230 1288490189:248 1395864371:267 1503238554:287 1610612736:308 1717986918:330 1825361101:353 \
        1932735283:378 2040109466:403 2147483648:431 2254857830:460 2362232013:491 2469606195:525 2576980378:562 \
        2684354560:602 2791728742:645 2899102925:693 3006477107:746 3113851290:806 3221225472:874 3328599654:952 \
        3435973837:1042 3543348019:1148 3650722202:1277 3758096384:1439 3865470566:1651 3951369912:1880 \
        4037269258:2198 4080218931:2417 4123168604:2703 4166118277:3094 4209067950:3718 4230542787:4205 \
        4252017623:4956 4264902525:5681 4277787427:6984 4286377361:8192 4294967296:8192",
};

/// Question and context in tokens: lognormal, median 150, sigma 0.36.
pub const SQUAD: Recipe = Recipe {
    seed: 102,
    knots: "\
        0:25 2147484:46 8589935:53 21474836:59 42949673:65 85899346:71 150323855:78 214748365:83 322122547:89 \
        429496730:94 536870912:99 644245094:103 751619277:107 858993459:111 966367642:114 1073741824:118 \
        1181116006:121 1288490189:124 1395864371:127 1503238554:130 1610612736:134 1717986918:137 1825361101:140 \
        1932735283:143 2040109466:147 2147483648:150 2254857830:153 2362232013:157 2469606195:161 2576980378:164 \
        2684354560:168 2791728742:172 2899102925:177 3006477107:181 3113851290:186 3221225472:191 3328599654:197 \
        3435973837:203 3543348019:210 3650722202:218 3758096384:227 3865470566:238 3951369912:249 4037269258:263 \
        4080218931:271 4123168604:282 4166118277:295 4209067950:314 4230542787:327 4252017623:346 4264902525:363 \
        4277787427:389 4286377361:422 4290672329:456 4292819812:490 4294108303:533 4294537799:565 4294838447:627 \
        4294967296:700",
};
