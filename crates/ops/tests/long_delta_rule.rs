//! The delta rule's accuracy bar at the head size of the 434M preset, 64 x 128: minutes.
#![allow(clippy::print_stdout)] // the worst differences, shown with --nocapture

mod delta_rule_bar;

use delta_rule_bar::sweep;

/// HAZARD 1, 2, 3: as the quick sweep, in full.
#[test]
fn full_head_size() {
    let lengths: Vec<usize> = (1..=130).chain([1000, 4096]).collect();
    let worst = sweep(&lengths, &[16, 32, 64, 128], [1, 64, 128]);
    println!("{worst:?}");
}
