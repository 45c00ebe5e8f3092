//! Numbers as people read them.

/// 433708992 as 433,708,992.
pub fn grouped(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::with_capacity(digits.len() * 4 / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i) % 3 == 0 {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// 433708992 as 433.7M.
pub fn short(n: u64) -> String {
    let n = n as f64;
    match n {
        n if n >= 1e9 => format!("{:.2}B", n / 1e9),
        n if n >= 1e6 => format!("{:.1}M", n / 1e6),
        n if n >= 1e3 => format!("{:.1}K", n / 1e3),
        n => n.to_string(),
    }
}

/// Before a figure that its type could not hold (see [`hymo_model::Cost`]).
pub fn or_more(n: u64) -> &'static str {
    if n == u64::MAX { "> " } else { "" }
}

/// 134217728 as 128.00 MiB.
pub fn bytes(n: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let steps = (1..UNITS.len()).take_while(|&i| n >> (10 * i) > 0).count();
    match steps {
        0 => format!("{n} B"),
        _ => format!("{}{:.2} {}", or_more(n), n as f64 / (1u64 << (10 * steps)) as f64, UNITS[steps]),
    }
}

/// Seconds as the two largest units.
pub fn time(seconds: f64) -> String {
    let s = seconds.max(0.).round() as u64;
    match s {
        s if s < 60 => format!("{s} s"),
        s if s < 3600 => format!("{} min {} s", s / 60, s % 60),
        s if s < 86_400 => format!("{} h {} min", s / 3600, s / 60 % 60),
        s => format!("{} d {} h", s / 86_400, s / 3600 % 24),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_for_people() {
        assert_eq!([0, 999, 1000, 433_708_992].map(grouped), ["0", "999", "1,000", "433,708,992"]);
        assert_eq!([12, 1_500, 433_708_992, 1_127_342_016].map(short), ["12", "1.5K", "433.7M", "1.13B"]);
        assert_eq!(
            [0, 1023, 1024, 128 << 20, 8 << 30].map(bytes),
            ["0 B", "1023 B", "1.00 KiB", "128.00 MiB", "8.00 GiB"]
        );
        assert_eq!(bytes(u64::MAX), "> 16777216.00 TiB");
        assert_eq!(
            [0.4, 59.6, 61., 3_700., 100_000.].map(time),
            ["0 s", "1 min 0 s", "1 min 1 s", "1 h 1 min", "1 d 3 h"]
        );
    }
}
