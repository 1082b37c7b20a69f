//! Settings of the environment: what is empty says nothing, what cannot be understood is refused by its name.

use std::time::Duration;

use crate::error::{Result, fail};

/// The value of a variable, if it says something.
pub fn get(name: &str) -> Option<String> {
    said(read(name))
}

/// What a variable says, whatever it is. What is not UTF-8 has characters in it that nothing is called by: it
/// is not understood, rather than not seen.
pub fn read(name: &str) -> Option<String> {
    std::env::var_os(name).map(|text| text.to_string_lossy().into_owned())
}

/// What variable `name` says by `text`, where it may be anything: refused if it was not UTF-8.
pub fn anything(name: &str, text: Option<String>) -> Result<Option<String>> {
    match text {
        Some(text) if text.contains(char::REPLACEMENT_CHARACTER) => {
            fail!(InvalidArgument, "{name} is not UTF-8; set it to a text that is")
        }
        text => Ok(text),
    }
}

/// What a variable says, if it is something.
pub fn said(text: Option<String>) -> Option<String> {
    text.map(|text| text.trim().to_owned()).filter(|text| !text.is_empty())
}

/// Whether variable `name`, which says `text`, switches something on.
pub fn switch(name: &str, text: Option<&str>) -> Result<Option<bool>> {
    match text {
        None => Ok(None),
        Some("0") => Ok(Some(false)),
        Some("1") => Ok(Some(true)),
        Some(text) => fail!(InvalidArgument, "{name}={text}: use 0 or 1"),
    }
}

/// The duration in seconds that variable `name` gives by `text`.
pub fn seconds(name: &str, text: Option<&str>) -> Result<Option<Duration>> {
    let Some(text) = text else { return Ok(None) };
    match decimal(text) {
        Some(duration) if !duration.is_zero() => Ok(Some(duration)),
        _ => fail!(InvalidArgument, "{name}={text}: use a number of seconds above 0"),
    }
}

/// A decimal number of seconds. What is below a nanosecond is left out. (Parsing any floating-point number
/// takes 14 KB of code.)
fn decimal(text: &str) -> Option<Duration> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    if !text.bytes().any(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let digits = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
    if !digits(whole) || !digits(fraction) {
        return None;
    }
    let seconds = if whole.is_empty() { 0 } else { whole.parse().ok()? };
    let nanoseconds = fraction.bytes().chain(std::iter::repeat(b'0')).take(9);
    let nanoseconds = nanoseconds.fold(0, |number, digit| 10 * number + u32::from(digit - b'0'));
    Some(Duration::new(seconds, nanoseconds))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_empty_says_nothing_and_blanks_around_it_do_not_count() {
        for (text, says) in [(None, None), (Some(""), None), (Some(" \n"), None), (Some(" 1 "), Some("1"))] {
            assert_eq!(said(text.map(str::to_owned)).as_deref(), says, "{text:?}");
        }
    }

    #[test]
    fn what_was_not_text_is_refused_where_any_text_would_do() {
        assert_eq!(
            (anything("HOST", None), anything("HOST", Some("höst".into()))),
            (Ok(None), Ok(Some("höst".into())))
        );
        let odd = String::from_utf8_lossy(b"h\xffst").into_owned();
        let error = anything("HOST", Some(odd)).expect_err("it was not UTF-8");
        assert!(error.text().contains("HOST is not UTF-8"), "{error}");
    }

    #[test]
    fn what_cannot_be_understood_is_refused_by_name() {
        for (text, on) in [(None, None), (Some("0"), Some(false)), (Some("1"), Some(true))] {
            assert_eq!(switch("HOST", text).expect("it is understood"), on, "{text:?}");
        }
        for text in ["true", "off", "2"] {
            let error = switch("HOST", Some(text)).expect_err("it is neither");
            assert!(error.text().contains(&format!("HOST={text}")), "{error}");
        }
        let half = Duration::from_millis(500);
        assert_eq!(seconds("WAIT", None), Ok(None));
        for (text, duration) in [
            ("0.5", half),
            (".5", half),
            ("30", 60 * half),
            ("30.", 60 * half),
            ("1.2500000009", 2 * half + half / 2),
            ("0.000000001", Duration::from_nanos(1)),
        ] {
            assert_eq!(seconds("WAIT", Some(text)), Ok(Some(duration)), "{text}");
        }
        for text in ["30s", "0", "0.0", "-1", "+1", "NaN", "inf", "1e30", "1.2.3", ".", "", "for ever"] {
            let error = seconds("WAIT", Some(text)).expect_err("it is no time");
            assert!(error.text().contains(&format!("WAIT={text}")), "{error}");
        }
    }
}
