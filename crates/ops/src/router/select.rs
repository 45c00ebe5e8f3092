//! Choosing the experts of a token: by s + bias, best first; ties go to the lower index, NaN comes last.

use hymo_tensor::Real;
use std::cmp::Ordering;

/// All experts in order: the oracle's way.
pub(super) fn ranked<T: Real>(s: &[T], bias: &[f32]) -> Vec<usize> {
    let key = |e: usize| {
        let v = s[e] + T::of(f64::from(bias[e]));
        if v.is_nan() { T::neg_infinity() } else { v }
    };
    let mut order: Vec<usize> = (0..s.len()).collect();
    order.sort_by(|&a, &b| key(b).partial_cmp(&key(a)).unwrap_or(Ordering::Equal)); // a stable sort
    order
}

/// Fills `chosen` with the first of them, by insertion into the best so far: `chosen` is short, and most experts fail its
/// last place at once.
pub(super) fn top_k(chosen: &mut [i32], s: &[f32], bias: &[f32]) {
    let key = |e: usize| {
        let v = s[e] + bias[e];
        if v.is_nan() { f32::NEG_INFINITY } else { v }
    };
    let mut len = 0;
    for e in 0..s.len() {
        let v = key(e);
        let mut at = len;
        // Only a strictly better score moves ahead: of equals, the one seen first stays.
        while at > 0 && v > key(chosen[at - 1] as usize) {
            at -= 1;
        }
        if at == chosen.len() {
            continue;
        }
        len = (len + 1).min(chosen.len());
        chosen.copy_within(at..len - 1, at + 1);
        chosen[at] = e as i32;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::Noise;

    fn choose(s: &[f32], bias: &[f32], k: usize) -> Vec<i32> {
        let mut chosen = vec![i32::MIN; k];
        top_k(&mut chosen, s, bias);
        chosen
    }

    #[test]
    fn ties_go_to_the_lower_index_and_nan_comes_last() {
        let none = [0.; 6];
        assert_eq!(choose(&[0.5; 6], &none, 3), [0, 1, 2]);
        assert_eq!(choose(&[0.1, 0.5, 0.2, 0.5, 0.5, 0.2], &none, 4), [1, 3, 4, 2]);
        assert_eq!(choose(&[f32::NAN, 0.1, f32::NAN, 0.9, 0.2, 0.3], &none, 6), [3, 5, 4, 1, 0, 2]);
        assert_eq!(choose(&[f32::NAN; 6], &[f32::INFINITY; 6], 2), [0, 1]);
        assert_eq!(choose(&[0.5; 2], &[f32::NEG_INFINITY, f32::NEG_INFINITY], 1), [0]);
    }

    /// Against a stable sort, on scores so coarse that most of them tie.
    #[test]
    fn partial_selection_is_the_head_of_a_stable_sort() {
        let mut noise = Noise::new(1);
        for round in 0..500 {
            let n = 1 + noise.below(20);
            let k = 1 + noise.below(n);
            let mut s: Vec<f32> = (0..n).map(|_| noise.below(5) as f32 / 4.).collect();
            if round % 4 == 0 {
                s[noise.below(n)] = f32::NAN;
            }
            let bias: Vec<f32> = (0..n).map(|_| noise.below(3) as f32 / 4. - 0.5).collect();
            let order: Vec<i32> = ranked(&s, &bias).into_iter().map(|e| e as i32).collect();
            assert_eq!(choose(&s, &bias, k), order[..k]);
        }
    }
}
