use std::collections::BTreeSet;

use toml::{Table, Value};

use super::schema::Absent;
use super::*;
use crate::presets;

fn run(model: ModelConfig) -> RunConfig {
    RunConfig::new(model)
}

/// Every optional field present; not all of them can be at once in a valid configuration.
fn everything() -> RunConfig {
    let mut model = presets::hymo_434m();
    model.loss.soft_cap = Some(30.0);
    if let (Some(gdn), Some(mla)) = (&mut model.gdn, &mut model.mla) {
        (gdn.d_ff, mla.d_ff) = (Some(1), Some(1));
        mla.yarn = Some(YarnConfig { factor: 8.0, original_context: 4096 });
    }
    let mut run = run(model);
    run.schedule.decay_from = Some(500);
    run
}

fn tree(config: &RunConfig) -> Table {
    Table::try_from(config).unwrap()
}

fn paths(table: &Table, prefix: &str, out: &mut BTreeSet<String>) {
    for (key, value) in table {
        let path = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
        match value {
            Value::Table(inner) => paths(inner, &path, out),
            _ => drop(out.insert(path)),
        }
    }
}

fn parent<'t>(tree: &'t mut Table, field: &Field) -> &'t mut Table {
    field.section().split('.').fold(tree, |t, key| t.get_mut(key).and_then(Value::as_table_mut).unwrap())
}

fn problems(tree: &Table) -> Vec<Problem> {
    match RunConfig::from_toml(&toml::to_string(tree).unwrap()) {
        Ok(_) => Vec::new(),
        Err(Error::Config(problems)) => problems.as_slice().to_vec(),
        Err(e) => panic!("{e}"),
    }
}

fn edited(edit: impl FnOnce(&mut ModelConfig)) -> Vec<String> {
    let mut model = presets::hymo_434m();
    edit(&mut model);
    model.validate().err().map_or(Vec::new(), |p| p.as_slice().iter().map(ToString::to_string).collect())
}

#[test]
fn schema_and_structs_have_the_same_fields() {
    let mut of_structs = BTreeSet::new();
    paths(&tree(&everything()), "", &mut of_structs);
    let of_schema: BTreeSet<String> = FIELDS.iter().map(|f| f.path.to_owned()).collect();
    assert_eq!(of_structs, of_schema);
    assert_eq!(FIELDS.len(), of_schema.len(), "a field is listed twice");
}

#[test]
fn a_field_left_out_is_what_the_schema_says() {
    let full = everything();
    for field in FIELDS {
        let mut tree = tree(&full);
        parent(&mut tree, field).remove(field.name());
        if field.absent == Absent::Wrong {
            let found = problems(&tree);
            assert!(found.iter().any(|p| p.path == field.path && p.found == "absent"), "{}: {found:?}", field.path);
            continue;
        }
        let read: RunConfig = tree.try_into().unwrap();
        let mut back = self::tree(&read);
        let value = parent(&mut back, field).get(field.name()).map(ToString::to_string);
        match field.absent {
            Absent::Default(text) => assert_eq!(value.as_deref(), Some(text), "{}", field.path),
            _ => assert_eq!(value, None, "{}", field.path),
        }
    }
}

#[test]
fn values_just_outside_a_range_are_refused_with_the_range() {
    for field in FIELDS {
        let floats = |low: f64, high: f64| [low, high, f64::NAN, f64::INFINITY].map(Value::Float).to_vec();
        let list = |items: &[Value]| Value::Array(items.to_vec());
        let bad = match field.kind {
            Kind::Int(min, max) => vec![Value::Integer(min - 1), Value::Integer(max + 1), Value::Float(1.5)],
            Kind::Num(min, max) => floats(min - min.abs().max(1e-3), max * 1.001),
            Kind::Above(min, max) => floats(min, max * 1.001),
            Kind::Bool => vec![Value::Integer(1)],
            Kind::Choice(_) => vec![Value::String("x".into()), Value::Boolean(true)],
            Kind::Choices(_) => vec![list(&[]), list(&[Value::String("x".into())]), Value::String("gdn".into())],
            Kind::Nums(min, _) => {
                vec![list(&[Value::Float(min - 1.0)]), list(&[Value::Float(f64::NAN)]), Value::Integer(1)]
            }
            Kind::Texts => {
                vec![list(&[Value::String(String::new())]), list(&[Value::Integer(1)]), Value::Boolean(true)]
            }
        };
        for value in bad {
            let mut tree = tree(&everything());
            parent(&mut tree, field).insert(field.name().to_owned(), value.clone());
            let found = problems(&tree);
            let at = found.iter().find(|p| p.path == field.path);
            let at = at.unwrap_or_else(|| panic!("{} = {value} passes: {found:?}", field.path));
            assert_eq!(at.expected, field.kind.allowed(), "{}", field.path);
        }
    }
}

#[test]
fn a_bad_file_is_reported_whole() {
    let text = r#"
        surprise = 1
        [model]
        vocab_size = 70_000
        d_modle = 896
        n_layers = "32"
        pattern = ["gdn", "gdn", "gdn", "mla"]
        [model.gdn]
        n_heads = -16
        d_k = 64
        d_v = 128
        gate_act = "sigmoyd"
        n_routed = 4
        [model.mla]
        n_heads = 16
        n_kv_groups = 5
        d_nope = 96
        d_rope = 31
        d_v = 128
        kv_latent = 128
        ffn = "moe"
        [model.moe]
        n_routed = 2
        n_shared = 1
        top_k = 3
        d_ff = 0
        routed_scale = nan
        [model.mtp]
        n_modules = 1
        [model]
    "#;
    // A section given twice is not TOML, and nothing else can be said.
    assert!(matches!(RunConfig::from_toml(text), Err(Error::Toml { .. })));
    let text = text.rsplit_once("[model]").unwrap().0;
    let found = RunConfig::from_toml(text).unwrap_err().to_string();
    let expected = "15 problems in the configuration:
  model.d_modle: found an unknown field, set to 896, expected a known field; did you mean \"d_model\"?
  model.gdn.n_routed: found an unknown field, set to 4, expected a field of this section; \"n_routed\" belongs to [model.moe]
  surprise: found an unknown field, set to 1, expected one of checkpoint, data, eval, model, optim, schedule, train
  model.vocab_size: found 70000, expected a whole number from 2 to 65536
  model.context_length: found absent, expected a whole number from 1 to 16777216
  model.d_model: found absent, expected a whole number from 1 to 65536
  model.n_layers: found \"32\", expected a whole number from 1 to 1024
  model.gdn.n_heads: found -16, expected a whole number from 1 to 1024
  model.gdn.gate_act: found \"sigmoyd\" (did you mean \"sigmoid\"?), expected \"sigmoid\" or \"silu\"
  model.mla.n_kv_groups: found 5, expected a divisor of model.mla.n_heads, 16
  model.mla.d_rope: found 31, expected an even number, as the numbers turn in pairs
  model.moe.top_k: found 3, expected at most model.moe.n_routed, 2
  model.moe.d_ff: found 0, expected a whole number from 1 to 1048576
  model.moe.routed_scale: found nan, expected a number from 0.001 to 100
  model.mtp.loss_weights: found a list of 0, expected one weight for each of model.mtp.n_modules, 1";
    assert_eq!(found, expected);
}

/// A number that no type holds is one problem of its field, and hides no other.
#[test]
fn numbers_out_of_range_are_problems_of_their_fields() {
    let printed = run(presets::hymo_nano()).to_toml();
    let text = printed
        .replace("d_model = 192", "d_model = 99999999999999999999")
        .replace("eps = 0.000001", "eps = 1e400")
        .replace("loss_weights = [0.3, 0.1]", "loss_weights = [0.3, -1e999]")
        .replace("chunk_size = 64", "chunk_size = 0xffff_ffff_ffff_ffff_f")
        .replace("d_k = 32", "d_k = inf")
        .replace("[model.moe]", "[model.moe]\nsurprise = 99999999999999999999")
        .replace("top_k = 2", "top_k = 65");
    let found = RunConfig::from_toml(&text).unwrap_err().to_string();
    let expected = "7 problems in the configuration:
  model.moe.surprise: found an unknown field, set to 99999999999999999999 (number out of range), expected one of";
    assert!(found.starts_with(expected), "{found}");
    for line in [
        "model.d_model: found 99999999999999999999 (number out of range), expected a whole number from 1 to 65536",
        "model.norm.eps: found 1e400 (number out of range), expected a number from",
        "model.gdn.d_k: found inf, expected a whole number from 1 to 1024",
        "model.gdn.chunk_size: found 0xffff_ffff_ffff_ffff_f (number out of range), expected a whole number",
        "model.moe.top_k: found 65, expected a whole number from 1 to 64",
        "model.mtp.loss_weights: found -1e999 (number out of range) as element 2 of 2, expected a list of numbers",
    ] {
        assert!(found.contains(&format!("\n  {line}")), "{line}\n{found}");
    }
}

#[test]
fn of_a_list_the_bad_element_is_named() {
    let mut tree = tree(&run(presets::hymo_nano()));
    let words = |list: &[&str]| Value::Array(list.iter().map(|&w| Value::String(w.into())).collect());
    tree["model"].as_table_mut().unwrap().insert("pattern".into(), words(&["gdn", "gdn", "GDN_", "mla"]));
    let found = problems(&tree)[0].to_string();
    let expected = "model.pattern: found \"GDN_\" as element 3 of 4 (did you mean \"gdn\"?), expected a list of";
    assert!(found.starts_with(expected), "{found}");
    for (list, said) in [(words(&[]), "a list of 0"), (words(&["gdn"; 1025]), "a list of 1025")] {
        tree["model"].as_table_mut().unwrap().insert("pattern".into(), list);
        assert_eq!(problems(&tree)[0].found, said);
    }
}

/// What a file holds is repeated in one short line without control characters, wherever it stands.
#[test]
fn a_hostile_file_is_answered_in_short_plain_lines() {
    let (long, escape) = ("k".repeat(1 << 20), "\\u001b[2J\\n");
    for text in [
        format!("{long} = 1"),
        format!("[model]\n\"{escape}\" = 1\npattern = [\"{escape}\"]"),
        format!("[model]\nd_model = \"{long}\"\npattern = [\"{long}\"]\nn_layers = {}", "9".repeat(1 << 20)),
        format!("[model\n{long}"),
        format!("x = \u{1b}[31m{long}"),
        format!("{long} {long}"),
        format!("a = {}1{}", "[".repeat(10_000), "]".repeat(10_000)),
    ] {
        let said = RunConfig::from_toml(&text).unwrap_err().to_string();
        assert!(said.lines().all(|l| l.chars().count() < 400), "{} characters", said.len());
        assert!(said.chars().all(|c| c == '\n' || !c.is_control()), "{said:?}");
    }
}

#[test]
fn what_is_not_toml_is_placed() {
    let said = RunConfig::from_toml("[model]\n  d_model 896\n").unwrap_err().to_string();
    assert!(said.starts_with("not TOML: line 2, column ") && said.ends_with(", in: d_model 896"), "{said}");
    assert_eq!(said.lines().count(), 1);
}

#[test]
fn sections_of_the_wrong_type_are_named_once() {
    let found = RunConfig::from_toml("model = 3").unwrap_err().to_string();
    assert_eq!(found, "1 problem in the configuration:\n  model: found 3, expected a section [model]");
    let found = RunConfig::from_toml("").unwrap_err().to_string();
    assert_eq!(found, "1 problem in the configuration:\n  model: found absent, expected a section [model]");
    let mut tree = tree(&run(presets::hymo_434m()));
    tree["model"].as_table_mut().unwrap().insert("mla".into(), Value::Boolean(true));
    let found = problems(&tree);
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!(found[0].to_string(), "model.mla: found true, expected a section [model.mla]");
}

#[test]
fn rules_between_fields() {
    type Edit = fn(&mut ModelConfig);
    let cases: &[(Edit, &str)] = &[
        (|m| m.n_layers = 33, "model.n_layers: found 33, expected a multiple of the pattern's length, 4"),
        (|m| m.gdn = None, "model.gdn: found absent, expected a section [model.gdn], as the pattern or the prediction"),
        (|m| m.mla = None, "model.mla: found absent, expected a section [model.mla], as the pattern has mla"),
        (|m| m.moe = None, "model.moe: found absent, expected a section [model.moe], as model.mla.ffn is \"moe\""),
        (|m| m.pattern = vec![LayerKind::Gdn], "model.mla: found a section, expected none"),
        (|m| mla(m).ffn = MlaFfn::None, "model.moe: found a section, expected none"),
        (|m| mla(m).ffn = MlaFfn::Swiglu, "model.mla.d_ff: found absent, expected a width"),
        (|m| mla(m).d_ff = Some(7), "model.mla.d_ff: found 7, expected none"),
        (|m| mla(m).d_rope = 0, "model.mla.d_rope: found 0, expected at least 2, or model.mla.rope = \"none\""),
        (
            |m| mla(m).yarn = Some(YarnConfig { factor: 2.0, original_context: 1024 }),
            "model.context_length: found 4096, expected at most factor * original_context of model.mla.yarn, 2048",
        ),
        (
            |m| (mla(m).rope, mla(m).yarn) = (Rope::None, Some(YarnConfig { factor: 1.0, original_context: 4096 })),
            "model.mla.yarn: found a section, expected none",
        ),
        (|m| gdn(m).chunk_size = 48, "model.gdn.chunk_size: found 48, expected a power of two"),
        (|m| gdn(m).ffn = GdnFfn::Swiglu, "model.gdn.d_ff: found absent, expected a width"),
        (
            |m| m.mtp.loss_weights = vec![0.3],
            "model.mtp.loss_weights: found a list of 1, expected one weight for each of",
        ),
        (|m| m.init.truncate = 0.5, "model.init.truncate: found 0.5, expected 0, or a number from 1 to 10"),
    ];
    for (edit, expected) in cases {
        let found = edited(edit);
        assert!(found.iter().any(|p| p.starts_with(expected)), "{expected}\nin {found:#?}");
    }
}

fn gdn(m: &mut ModelConfig) -> &mut GdnConfig {
    m.gdn.as_mut().unwrap()
}

fn mla(m: &mut ModelConfig) -> &mut MlaConfig {
    m.mla.as_mut().unwrap()
}

#[test]
fn rows_are_whole_micro_batches() {
    let mut config = run(presets::hymo_nano());
    (config.train.rows, config.train.micro_rows) = (10, 4);
    let found = config.validate().unwrap_err().to_string();
    assert!(found.contains("train.rows: found 10, expected a multiple of train.micro_rows, 4"), "{found}");
}

#[test]
fn assignments_stand_over_the_file() {
    let text = run(presets::hymo_nano()).to_toml();
    let with = |sets: &[&str]| RunConfig::from_toml_with(&text, sets).map_err(|e| e.to_string());
    let set = with(&["schedule.kind=cosine", "optim.lr = 2e-3", "data.shards=a b", "optim.lr=0.003"]).unwrap();
    assert_eq!((set.schedule.kind, set.optim.lr), (ScheduleKind::Cosine, 3e-3));
    assert_eq!(set.data.shards, ["a b"]);
    assert_eq!(with(&["data.shards=[\"a\", 'b']", "train.on_non_finite='skip'"]).unwrap().data.shards, ["a", "b"]);
    for (bad, expected) in [
        ("optim.lr", "optim.lr: found no \"=\", expected section.field=value"),
        ("=3", "=3: found no name of a field before \"=\""),
        ("optim..lr=3", "found no name of a field"),
        ("optim.lr=99", "optim.lr: found 99, expected a number above 0, up to 10"),
        ("optim.lr=1e999", "optim.lr: found 1e999 (number out of range)"),
        ("optim.lr=high", "optim.lr: found \"high\", expected a number"),
        ("optim.lrs=1", "did you mean \"lr\"?"),
        ("schedule.kind=cosin", "did you mean \"cosine\"?"),
        ("optim=1", "optim: found 1, expected a section [optim]"),
        ("data.shards=", "data.shards: found"),
        ("optim.lr=1\noptim.ema=0.5", "optim.lr"),
    ] {
        let found = with(&[bad]).unwrap_err();
        assert!(found.contains(expected), "{bad}: {found}");
    }
}

#[test]
fn shares_belong_to_folders() {
    let found = |shards: &[&str], weights: &[f64]| {
        let mut config = run(presets::hymo_nano());
        config.data.shards = shards.iter().map(|&s| s.to_owned()).collect();
        config.data.weights = weights.to_vec();
        config.validate().err().map_or(String::new(), |p| p.to_string())
    };
    assert_eq!((found(&["a", "b"], &[1., 2.]), found(&["a", "b"], &[])), (String::new(), String::new()));
    let one = found(&["a", "b"], &[1.]);
    assert!(one.contains("data.weights: found a list of 1, expected one for each of data.shards, 2, or none"), "{one}");
    let zero = found(&["a", "b"], &[1., 0.]);
    assert!(zero.contains("data.weights: found 0 as element 2 of 2, expected shares above 0"), "{zero}");
}

#[test]
fn rules_of_the_schedule() {
    type Edit = fn(&mut ScheduleConfig);
    let cases: &[(Edit, &str)] = &[
        (
            |s| (s.warmup, s.decay) = (0.75, 0.5),
            "schedule.decay: found 0.5, expected at most what schedule.warmup leaves, 0.25",
        ),
        (
            |s| s.decay_from = Some(19),
            "schedule.decay_from: found 19, expected from 20, where the warm-up ends, to below",
        ),
        (
            |s| s.decay_from = Some(1000),
            "schedule.decay_from: found 1000, expected from 20, where the warm-up ends, to",
        ),
        (
            |s| (s.kind, s.decay_from) = (ScheduleKind::Cosine, Some(100)),
            "schedule.decay_from: found 100, expected none: it is read only when schedule.kind is \"wsd\"",
        ),
    ];
    for (edit, expected) in cases {
        let mut config = run(presets::hymo_nano());
        edit(&mut config.schedule);
        let found = config.validate().unwrap_err().to_string();
        assert!(found.contains(&format!("1 problem in the configuration:\n  {expected}")), "{expected}\nin {found}");
    }
    let mut config = run(presets::hymo_nano());
    (config.schedule.kind, config.schedule.warmup) = (ScheduleKind::Cosine, 1.0);
    assert!(config.validate().is_ok());
}

#[test]
fn absurd_sizes_are_problems_and_never_panics() {
    let found = edited(|m| {
        (m.d_model, m.n_layers) = (65_536, 1024);
        m.moe.as_mut().unwrap().d_ff = 1 << 20;
        m.moe.as_mut().unwrap().n_routed = 4096;
    });
    assert_eq!(found.len(), 2, "{found:?}");
    assert!(found[0].starts_with("model.d_model: found sizes that make "), "{found:?}");
    assert!(found[1].starts_with("model.n_layers: found layers and experts that make "), "{found:?}");
    let found = edited(|m| (m.d_model, m.n_layers, m.vocab_size) = (1 << 62, 1 << 62, 0));
    assert_eq!(found.len(), 3, "{found:?}");
    let found = edited(|m| (m.d_model, mla(m).n_kv_groups) = (usize::MAX, 0));
    assert!(!found.is_empty());
}

#[test]
fn whole_numbers_may_stand_for_fractional_ones() {
    let text = run(presets::hymo_434m()).to_toml().replace("rope_theta = 10000.0", "rope_theta = 10000");
    assert_eq!(RunConfig::from_toml(&text).unwrap().model, presets::hymo_434m());
}

#[test]
fn the_printed_form_reads_back_and_explains_every_field() {
    for preset in presets::PRESETS {
        let config = run(preset.model());
        let text = config.to_toml();
        assert_eq!(RunConfig::from_toml(&text).unwrap(), config, "{}", preset.name);
        let values = text.lines().filter(|l| l.contains(" = "));
        assert!(values.into_iter().all(|l| l.contains("  # ")), "{text}");
    }
}

mod any_tree {
    use proptest::prelude::*;

    use super::*;

    /// A value of any type for a field of any type.
    fn value() -> impl Strategy<Value = Value> {
        prop_oneof![
            any::<i64>().prop_map(Value::Integer),
            (0i64..300).prop_map(Value::Integer),
            any::<f64>().prop_map(Value::Float),
            any::<bool>().prop_map(Value::Boolean),
            "[a-z]{0,8}".prop_map(Value::String),
            Just(Value::Table(Table::new())),
            prop::collection::vec((0i64..3).prop_map(Value::Integer), 0..3).prop_map(Value::Array),
        ]
    }

    proptest! {
        /// Whatever stands in a file, it is read or all of it is explained; and what is read is valid.
        #[test]
        fn is_read_or_explained(edits in prop::collection::vec((0..FIELDS.len(), value()), 0..6)) {
            let mut tree = tree(&run(presets::hymo_nano()));
            for (at, value) in edits {
                let section = FIELDS[at].section();
                let there = section.split('.').try_fold(&mut tree, |t, k| t.get_mut(k).and_then(Value::as_table_mut));
                if let Some(table) = there {
                    table.insert(FIELDS[at].name().to_owned(), value);
                }
            }
            match check::check(tree, read::Beyond::new()) {
                Ok(config) => prop_assert!(config.validate().is_ok()),
                Err(problems) => prop_assert!(!problems.as_slice().is_empty()),
            }
        }
    }
}
