use super::*;
use crate::record::{Evaluation, Note, Sample};
use serde_json::Value;
use std::time::Instant;

const LAYERS: usize = 8;
const EXPERTS: usize = 16;

fn start(step: u64) -> Record {
    Record::Start(Start {
        time: 1000. + step as f64,
        name: "a <run>".into(),
        version: "0.1.0".into(),
        step,
        num_steps: 1000,
        device: "cpu".into(),
        params: (10, 20),
        tokens_per_step: 100,
        flops_per_token: 1e9,
        peak_flops: Some(1e12),
    })
}

/// A step whose losses begin at `loss`.
fn step(step: u64, loss: f64) -> StepReport {
    let wave = |at: usize| ((step as f64) * 0.37 + at as f64).sin();
    StepReport {
        step,
        time: 1000. + step as f64,
        losses: vec![loss, loss + 1.234567, loss + 2.],
        total: loss * 1.5,
        balance: 1e-4 * (2. + wave(0)),
        lr: 3e-4,
        grad_norm: 0.5 + 0.3 * wave(1),
        stepped: true,
        refused: None,
        max_violation: (0..LAYERS).map(|at| 1. + 0.5 * wave(at)).collect(),
        expert_load: vec![vec![1. / EXPERTS as f32; EXPERTS]; LAYERS],
        max_logits: (0..LAYERS).map(|at| 20. * wave(at)).collect(),
        tokens: 100,
        total_tokens: 100 * step,
        epoch: 0,
        seconds: 0.987654321,
        data_seconds: 0.01,
        mfu: Some(0.4),
    }
}

fn eval(step: u64, text: &str) -> Evaluation {
    Evaluation {
        step,
        time: 1000.5 + step as f64,
        loss: 2.5,
        bits_per_byte: 1.25,
        mtp_losses: vec![3., f64::NAN],
        tokens: 10,
        bytes: 30,
        best: true,
        samples: vec![Sample { prompt: "fn ".into(), text: text.into() }],
        seconds: 1.,
    }
}

fn note(step: u64, text: &str) -> Record {
    Record::Note(Note { step, time: 1000., text: text.into() })
}

/// The data in a page, as a browser finds it: up to the first `</script`.
fn data_text(page: &str) -> &str {
    let begins = page.find(r#"type="application/json">"#).unwrap() + r#"type="application/json">"#.len();
    let len = page[begins..].find("</script").unwrap();
    &page[begins..begins + len]
}

fn data(page: &str) -> Value {
    serde_json::from_str(data_text(page)).unwrap()
}

/// A curve's means.
fn curve(data: &Value, name: &str) -> Vec<Option<f64>> {
    let curves = data["scalars"]["curves"].as_array().unwrap();
    let found = curves.iter().find(|curve| curve["name"] == name).unwrap();
    found["mean"].as_array().unwrap().iter().map(Value::as_f64).collect()
}

#[test]
fn untrusted_text_stays_text() {
    let evil = "</script><script>alert(1)</script><!-- <script> \u{2028}\u{2029} &amp; \" ' {data} {style} \0 😀 ]]>";
    let mut report = Report::new(evil);
    let clean = Report::new("").render();
    let elements = |page: &str| (page.matches("<script").count(), page.matches("</script").count());
    for record in [Record::Eval(eval(0, evil)), note(0, evil)] {
        report.push(&record);
    }
    let page = report.render();
    assert_eq!(elements(&page), elements(&clean));
    assert!(!page.contains("<!--"));
    assert!(!data_text(&page).contains(['<', '>', '&', '\u{2028}', '\u{2029}']));
    let read = data(&page);
    assert_eq!(read["written"][0]["samples"][0]["text"], evil);
    assert_eq!(read["notes"][0]["text"], evil);
    assert_eq!(read["run"]["name"], evil);
    assert!(page.contains("<title>&lt;/script&gt;"));

    let Record::Start(mut begins) = start(0) else { unreachable!() };
    (begins.name, begins.device, begins.version) = (evil.into(), evil.into(), evil.into());
    report.push(&Record::Start(begins));
    assert_eq!(elements(&report.render()), elements(&clean));
}

#[test]
fn the_page_loads_nothing() {
    let mut report = Report::new("a");
    report.push(&start(0));
    let page = report.render();
    for outside in ["http://", "https://", "src=", "@import", "url("] {
        assert!(!page.contains(outside), "{outside}");
    }
    assert_eq!(page.matches("href=").count(), 1);
    assert!(page.contains(r#"href="data:,""#), "no icon is asked for");
    for place in ["{title}", "{style}", "{program}", "{data}", "{latest}", "{refresh}"] {
        assert!(!page.contains(place), "{place} is filled");
    }
}

#[test]
fn a_run_without_steps_has_a_page() {
    let mut report = Report::new("empty");
    let read = data(&report.render());
    assert_eq!((read["state"]["step"].as_u64(), read["run"]["num_steps"].as_u64()), (Some(0), None));
    report.push(&start(0));
    assert!(report.render().contains("http-equiv=\"refresh\""));
    report.finish();
    assert!(!report.render().contains("http-equiv=\"refresh\""), "what is over stays as it is");
    let read = data(&report.render());
    assert_eq!(read["state"]["ended"], true);
    assert_eq!(read["state"]["complete"], false);
}

#[test]
fn numbers_that_are_not_finite_are_null() {
    let mut report = Report::new("a");
    for (number, loss) in [(1, 5.), (2, f64::NAN), (3, f64::INFINITY), (4, 4.)] {
        report.push(&Record::Step(StepReport { stepped: loss.is_finite(), grad_norm: loss, ..step(number, loss) }));
    }
    report.push(&Record::Eval(Evaluation { loss: f64::NAN, ..eval(4, "") }));
    let read = data(&report.render());
    assert_eq!(curve(&read, "main"), [Some(5.), None, None, Some(4.)]);
    assert_eq!(read["refused"], serde_json::json!([2, 3]));
    assert_eq!(read["evals"][0]["loss"], Value::Null);
}

#[test]
fn a_long_run_is_a_small_page_and_quickly_drawn() {
    let mut report = Report::new("long");
    report.push(&start(0));
    for number in 1..=100_000 {
        report.push(&Record::Step(step(number, 10. / (number as f64).ln_1p())));
        if number % 50 == 0 {
            report.push(&Record::Eval(eval(number, &"<\u{1}".repeat(10_000))));
            report.push(&note(number, &"<".repeat(10_000)));
        }
    }
    let begins = Instant::now();
    let page = report.render();
    let seconds = begins.elapsed().as_secs_f64();
    assert!(page.len() < 2_000_000, "{} bytes", page.len());
    // Milliseconds; the bound is for a machine that is busy with other tests.
    assert!(seconds < 0.5, "{seconds} s");
    let read = data(&page);
    let points = curve(&read, "main");
    assert!((1000..=2000).contains(&points.len()) && points.iter().all(Option::is_some));
    assert!(read["evals"].as_array().unwrap().len() <= 1000);
    assert_eq!(read["evals"].as_array().unwrap().last().unwrap()["step"], 100_000);
    assert_eq!(read["load"]["layers"].as_array().unwrap().len(), LAYERS);
    let columns = read["load"]["step"].as_array().unwrap().len();
    assert_eq!(read["load"]["layers"][0].as_str().unwrap(), "g".repeat(EXPERTS * columns), "equal shares");
}

#[test]
fn samples_take_no_more_room_than_there_is_however_many_there_are() {
    let mut report = Report::new("a");
    let text = "é".repeat(3_000);
    let many = |n| vec![Sample { prompt: text.clone(), text: text.clone() }; n];
    for (number, n) in [(1, 3), (2, 2), (3, 1)] {
        report.push(&Record::Eval(Evaluation { samples: many(n), ..eval(number, "") }));
    }
    let read = data(&report.render());
    assert_eq!(read["written"].as_array().unwrap().len(), 3);
    assert_eq!(read["written"][0]["step"], 3, "the latest first");
    assert_eq!(read["written"][0]["samples"][0]["text"], "é".repeat(2_000) + "…");
    report.push(&Record::Eval(Evaluation { samples: many(1000), ..eval(4, "") }));
    assert!(report.render().len() < 200_000);
}

#[test]
fn steps_that_are_taken_twice_count_as_they_were_taken_last() {
    let mut report = Report::new("a");
    report.push(&start(0));
    (1..=10).for_each(|number| report.push(&Record::Step(step(number, 1.))));
    report.push(&Record::Eval(eval(10, "first")));
    report.push(&start(6));
    let read = data(&report.render());
    assert_eq!((curve(&read, "main").len(), read["state"]["step"].as_u64()), (6, Some(6)));
    assert_eq!(read["evals"], serde_json::json!([]));
    (7..=10).for_each(|number| report.push(&Record::Step(step(number, 2.))));
    report.push(&Record::Eval(eval(10, "second")));
    // A way back without a start.
    (9..=12).for_each(|number| report.push(&Record::Step(step(number, 3.))));
    let read = data(&report.render());
    let want = [1., 1., 1., 1., 1., 1., 2., 2., 3., 3., 3., 3.].map(Some);
    assert_eq!(curve(&read, "main"), want);
    assert_eq!(read["scalars"]["step"], serde_json::json!((1..=12).collect::<Vec<u64>>()));
    assert_eq!(read["run"]["starts"], 2);
}

/// A log's lines.
fn lines(records: &[Record]) -> String {
    records.iter().map(|record| serde_json::to_string(record).unwrap() + "\n").collect()
}

#[test]
fn a_log_gives_the_page_that_its_records_gave() {
    let dir = tempfile::tempdir().unwrap();
    let (log, page) = (dir.path().join("log.jsonl"), dir.path().join("report.html"));
    let mut records = vec![start(0)];
    records.extend((1..=20).map(|number| Record::Step(step(number, 1. / number as f64))));
    records.extend([Record::Eval(eval(20, "text")), note(20, "checkpoint"), start(15)]);
    records.extend((16..=30).map(|number| Record::Step(step(number, f64::NAN))));
    let mut live = Report::new("");
    records.iter().for_each(|record| live.push(record));
    let whole = lines(&records);
    let torn = serde_json::to_string(&Record::Step(step(31, 1.))).unwrap();
    for tail in ["", &torn[..1], &torn[..torn.len() - 1], &torn[..100]] {
        fs::write(&log, format!("{whole}{tail}")).unwrap();
        let read = Report::from_log(&log).unwrap();
        assert_eq!(read.render(), live.render(), "after {tail}");
        read.write(&page).unwrap();
        assert_eq!(fs::read_to_string(&page).unwrap(), live.render());
    }
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2, "no temporary file is left");
}

#[test]
fn a_line_inside_that_cannot_be_read_is_counted() {
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("log.jsonl");
    let torn = serde_json::to_string(&Record::Step(step(2, 1.))).unwrap();
    let text = format!("{}{}{}\n", lines(&[start(0), Record::Step(step(1, 1.))]), &torn[..150], lines(&[start(1)]));
    let mut bytes = text.into_bytes();
    bytes.extend(b"\xff\xfe\n");
    bytes.extend(lines(&[Record::Step(step(2, 2.))]).bytes());
    fs::write(&log, bytes).unwrap();
    let read = data(&Report::from_log(&log).unwrap().render());
    assert_eq!(read["state"]["unread"], 2);
    assert_eq!(read["run"]["starts"], 2, "the start right behind half a line is found");
    assert_eq!(curve(&read, "main"), [Some(1.), Some(2.)]);
    assert!(Report::from_log(&dir.path().join("none")).is_err());
}

#[test]
fn a_log_that_reached_its_last_step_is_of_a_run_that_is_over() {
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("log.jsonl");
    fs::write(&log, lines(&[start(0), Record::Step(step(1000, 1.))])).unwrap();
    let mut report = Report::from_log(&log).unwrap();
    assert_eq!(data(&report.render())["state"]["ended"], true);
    report.push(&start(1000));
    assert_eq!(data(&report.render())["state"]["ended"], false, "it goes on");
}
