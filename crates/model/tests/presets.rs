//! The files in `configs/` are the presets as printed.

use hymo_model::presets::PRESETS;

#[test]
fn config_files_are_the_printed_presets() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs");
    for preset in PRESETS {
        let path = folder.join(format!("{}.toml", preset.name));
        let file = std::fs::read_to_string(&path).unwrap_or_default();
        let how = format!("hymo inspect {0} --print-config > configs/{0}.toml", preset.name);
        assert!(file == preset.to_toml(), "configs/{}.toml differs from the preset; run `{how}`", preset.name);
    }
}
