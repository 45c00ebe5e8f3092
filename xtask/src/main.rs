//! hymo
fn main() {}
