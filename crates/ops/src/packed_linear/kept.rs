//! How weights lie in memory: in words of 32 bits, made so that a register of words becomes registers of neighbours.
//!
//! Of a group of [`WORDS`] x PER numbers, word i holds number i in its lowest bits, then i + WORDS, and so on. Shifts and
//! masks then give whole registers of f32 in the order of the row: no instruction crosses lanes, and memory is read straight
//! on. The last group of a row is filled up; what meets the filling are zeros.

use hymo_tensor::{Mat, Result, Tensor};
use pulp::Simd;

/// Words of a group: the lanes of the widest registers.
pub const WORDS: usize = 16;

/// A kind of number.
pub trait Kept: Copy + Send + Sync + 'static {
    /// Numbers of a word.
    const PER: usize;
    /// What a row is kept as.
    type Word: Copy + Default + Send + Sync + pulp::bytemuck::Pod;

    /// The matrix of words.
    fn rows(values: &Tensor) -> Result<Mat<'_, Self::Word>>;

    /// The `part`-th numbers of a register of words.
    fn part<V: Simd>(v: V, words: V::u32s, part: usize) -> V::f32s;

    /// The `part`-th number of a word.
    fn of(word: Self::Word, part: usize) -> f32;

    /// Word and part of number `k` of a row.
    #[inline(always)]
    fn place(k: usize) -> (usize, usize) {
        let group = WORDS * Self::PER;
        (k / group * WORDS + k % WORDS, k % group / WORDS)
    }

    /// Number `k` of a row.
    #[inline(always)]
    fn number(row: &[Self::Word], k: usize) -> f32 {
        let (word, part) = Self::place(k);
        Self::of(row[word], part)
    }
}

/// One number a word, as it is; its rows are not filled up.
#[derive(Clone, Copy)]
pub struct F32;

impl Kept for F32 {
    const PER: usize = 1;
    type Word = f32;

    fn rows(values: &Tensor) -> Result<Mat<'_, f32>> {
        values.view()
    }

    #[inline(always)]
    fn part<V: Simd>(v: V, words: V::u32s, _: usize) -> V::f32s {
        v.transmute_f32s_u32s(words)
    }

    #[inline(always)]
    fn of(word: f32, _: usize) -> f32 {
        word
    }
}

/// Two numbers a word.
#[derive(Clone, Copy)]
pub struct Bf16;

impl Kept for Bf16 {
    const PER: usize = 2;
    type Word = i32;

    fn rows(values: &Tensor) -> Result<Mat<'_, i32>> {
        values.view()
    }

    #[inline(always)]
    fn part<V: Simd>(v: V, words: V::u32s, part: usize) -> V::f32s {
        v.transmute_f32s_u32s(match part {
            0 => v.wrapping_dyn_shl_u32s(words, v.splat_u32s(16)),
            _ => v.and_u32s(words, v.splat_u32s(0xffff_0000)),
        })
    }

    #[inline(always)]
    fn of(word: i32, part: usize) -> f32 {
        f32::from_bits(if part == 0 { (word as u32) << 16 } else { word as u32 & 0xffff_0000 })
    }
}

/// Four numbers a word, each q + 128 without a sign.
#[derive(Clone, Copy)]
pub struct Int8;

/// 2^23 as bits: the lowest bits of a number from there on count in ones.
const ONES: u32 = 0x4b00_0000;
/// 2^23 + 128.
const ZERO: f32 = 8_388_736.;

impl Int8 {
    pub fn bits(q: i8) -> u32 {
        u32::from(q as u8 ^ 0x80)
    }
}

impl Kept for Int8 {
    const PER: usize = 4;
    type Word = i32;

    fn rows(values: &Tensor) -> Result<Mat<'_, i32>> {
        values.view()
    }

    #[inline(always)]
    fn part<V: Simd>(v: V, words: V::u32s, part: usize) -> V::f32s {
        let shifted = match part {
            0 => words,
            _ => v.wrapping_dyn_shr_u32s(words, v.splat_u32s(8 * part as u32)),
        };
        let bits = v.or_u32s(v.and_u32s(shifted, v.splat_u32s(0xff)), v.splat_u32s(ONES));
        v.sub_f32s(v.transmute_f32s_u32s(bits), v.splat_f32s(ZERO))
    }

    #[inline(always)]
    fn of(word: i32, part: usize) -> f32 {
        f32::from_bits(word as u32 >> (8 * part) & 0xff | ONES) - ZERO
    }
}
