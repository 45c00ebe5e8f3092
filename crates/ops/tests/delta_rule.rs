//! The delta rule's accuracy bar: outputs of the chunk form within 1e-5 of token by token, the final state within 1e-5 of
//! its largest element, in f32, whatever the gates, the keys, the length and the chunk. Full head sizes: long_delta_rule.

#![allow(clippy::print_stdout)] // the worst differences, shown with --nocapture

mod delta_rule_bar;

use delta_rule_bar::sweep;

const CHUNKS: [usize; 4] = [16, 32, 64, 128];

/// HAZARD 1, 2, 3: every tail of a chunk.
#[test]
fn every_length_to_130() {
    let worst = sweep(&(1..=130).collect::<Vec<_>>(), &CHUNKS, [1, 16, 16]);
    println!("{worst:?}");
}

/// HAZARD 2, 3: errors must not pile up over many chunks.
#[test]
fn thousands_of_tokens() {
    let worst = sweep(&[1000, 4096], &CHUNKS, [1, 16, 16]);
    println!("{worst:?}");
    let worst = sweep(&[1000], &[64], [1, 64, 32]);
    println!("{worst:?}");
}
