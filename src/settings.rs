//! Settings of the environment: what is empty says nothing, what cannot be understood is refused by its name.

use std::time::Duration;

use crate::error::{Result, fail};

/// The value of a variable, if it says something.
pub fn get(name: &str) -> Option<String> {
    said(std::env::var(name).ok())
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
    match text.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok()) {
        Some(duration) if !duration.is_zero() => Ok(Some(duration)),
        _ => fail!(InvalidArgument, "{name}={text}: use a number of seconds above 0"),
    }
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
    fn what_cannot_be_understood_is_refused_by_name() {
        for (text, on) in [(None, None), (Some("0"), Some(false)), (Some("1"), Some(true))] {
            assert_eq!(switch("HOST", text).expect("it is understood"), on, "{text:?}");
        }
        for text in ["true", "off", "2"] {
            let error = switch("HOST", Some(text)).expect_err("it is neither");
            assert!(error.text().contains(&format!("HOST={text}")), "{error}");
        }
        let half = Duration::from_millis(500);
        for (text, duration) in [(None, None), (Some("0.5"), Some(half)), (Some("30"), Some(60 * half))] {
            assert_eq!(seconds("WAIT", text).expect("it is understood"), duration, "{text:?}");
        }
        for text in ["30s", "0", "-1", "NaN", "inf", "1e30", "for ever"] {
            let error = seconds("WAIT", Some(text)).expect_err("it is no time");
            assert!(error.text().contains(&format!("WAIT={text}")), "{error}");
        }
    }
}
