//! The lists that Slurm writes into the environment.

#![forbid(unsafe_code)]

/// More nodes than any job has; a list that claims more is a mistake.
const MOST_NODES: usize = 1 << 20;

/// The first host of a list such as `node[01-03,7],login`; `None` if the list is malformed.
pub(super) fn first_host(list: &str) -> Option<String> {
    let mut host = String::new();
    let mut rest = list.trim();
    loop {
        let end = rest.find(['[', ',']).unwrap_or(rest.len());
        host.push_str(&rest[..end]);
        rest = &rest[end..];
        if !rest.starts_with('[') {
            break;
        }
        // `01-03,7` begins with 01; leading zeros are part of the name.
        let (range, after) = rest[1..].split_once(']')?;
        let first = range.split([',', '-']).next()?;
        if first.is_empty() || !first.bytes().all(|byte| byte.is_ascii_digit()) {
            return None;
        }
        host.push_str(first);
        rest = after;
    }
    let proper = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    (!host.is_empty() && host.bytes().all(proper)).then_some(host)
}

/// How many tasks each node has, from `2(x3),1`; `None` if the list is malformed.
pub(super) fn tasks_per_node(list: &str) -> Option<Vec<usize>> {
    let mut tasks = Vec::new();
    for group in list.trim().split(',') {
        let (count, times) = match group.split_once("(x") {
            Some((count, times)) => (count, times.strip_suffix(')')?.parse().ok()?),
            None => (group, 1_usize),
        };
        let count: usize = count.parse().ok()?;
        if times > MOST_NODES - tasks.len() {
            return None;
        }
        tasks.extend(std::iter::repeat_n(count, times));
    }
    Some(tasks)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_first_host_of_every_form() {
        for (list, host) in [
            ("node7", "node7"),
            ("node1,node2", "node1"),
            ("node[01-03,7],login", "node01"),
            ("node[7,9]", "node7"),
            ("rack[2-3]n[04-05]", "rack2n04"),
            ("gpu-[1-2].cluster", "gpu-1.cluster"),
        ] {
            assert_eq!(first_host(list).as_deref(), Some(host), "{list}");
        }
        for list in ["", ",", "node[", "node[]", "node[a-b]", "node[1-2", "a b", "$(x)", "[", "[[1]]"] {
            assert_eq!(first_host(list), None, "{list}");
        }
    }

    #[test]
    fn tasks_of_every_form() {
        assert_eq!(tasks_per_node("4"), Some(vec![4]));
        assert_eq!(tasks_per_node("2(x3),1"), Some(vec![2, 2, 2, 1]));
        for list in
            ["", "x", "2(x", "2(x3", "2(3)", "-1", "2(x99999999999)", "2(x18446744073709551615),1", "1,"]
        {
            assert_eq!(tasks_per_node(list), None, "{list}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_taken_or_refused(text in "[a-z0-9\\[\\],()x-]{0,40}|.{0,40}") {
            if let Some(host) = first_host(&text) {
                prop_assert!(!host.is_empty() && !host.contains(['[', ']', ',', ' ']));
            }
            if let Some(tasks) = tasks_per_node(&text) {
                prop_assert!(!tasks.is_empty() && tasks.len() <= MOST_NODES);
            }
        }
    }
}
