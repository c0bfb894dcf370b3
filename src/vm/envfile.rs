//! Files of variables as `istioctl` and people write them for a shell: `KEY='value'`, `export KEY="value"`, comments.

/// The assignments in the file's order.
///
/// # Errors
/// Every line that is no plain assignment, with its number; `name` is the file as the user knows it.
pub(crate) fn parse(name: &str, text: &str) -> Result<Vec<(String, String)>, Vec<String>> {
    let mut out = Vec::new();
    let mut errors = Vec::new();
    let mut lines = text.lines().enumerate();
    while let Some((at, line)) = lines.next() {
        let mut logical = line.to_owned();
        let mut quotes = Quotes::default();
        let mut meant = quotes.read(line);
        // A quoted value may go on in the next line, and so may one behind a backslash.
        while quotes.open() || quotes.goes_on {
            let Some((_, more)) = lines.next() else { break };
            if quotes.goes_on {
                logical.pop();
            } else {
                logical.push('\n');
            }
            let later = quotes.read(more);
            meant = meant.or(later);
            logical.push_str(more);
        }
        let place = format!("{name}:{}", at + 1);
        if quotes.open() {
            errors.push(format!("{place}: a quote is not closed"));
            break;
        }
        if quotes.goes_on {
            errors.push(format!("{place}: nothing follows the backslash at the end of the line"));
            break;
        }
        if let Some('$' | '`') = meant {
            errors.push(format!(
                "{place}: only a shell can compute $ and `: write the value itself, in single quotes if it has such a character"
            ));
            continue;
        }
        if let Some(c) = meant {
            errors.push(format!(
                "{place}: {c} means something to a shell here: write the value in single quotes if it has such a character, and \
                 one assignment a line"
            ));
            continue;
        }
        let mut words = shlex::Shlex::new(&logical);
        for word in words.by_ref() {
            match word.split_once('=') {
                Some((key, value)) if is_name(key) => out.push((key.to_owned(), value.to_owned())),
                None if word == "export" => {}
                // The value is not shown: it may be a secret.
                _ => errors.push(format!(
                    "{place}: {:?} is no assignment KEY='value'",
                    word.chars().take(24).collect::<String>()
                )),
            }
        }
        if words.had_error {
            errors.push(format!("{place}: this is no line that a shell could read"));
        }
    }
    if errors.is_empty() { Ok(out) } else { Err(errors) }
}

fn is_name(key: &str) -> bool {
    !key.is_empty()
        && !key.starts_with(|c: char| c.is_ascii_digit())
        && key.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}

/// Which quote is open; what the splitter does not tell.
#[derive(Default)]
struct Quotes {
    open: Option<char>,
    /// The line ends with a backslash that joins the next one to it.
    goes_on: bool,
}

impl Quotes {
    // What of the line a shell would not take as it is: what it would compute, and outside quotes what ends a command, joins
    // it to another, sends it elsewhere, or is a home directory.
    fn read(&mut self, line: &str) -> Option<char> {
        let mut meant = None;
        let mut before = if std::mem::take(&mut self.goes_on) { '\\' } else { ' ' };
        let mut chars = line.chars();
        while let Some(c) = chars.next() {
            match (self.open, c) {
                (None | Some('"'), '\\') => self.goes_on = chars.next().is_none(),
                (None, '#') if before.is_whitespace() => return meant,
                (None, '\'' | '"') => self.open = Some(c),
                (Some(open), _) if c == open => self.open = None,
                (None | Some('"'), '$' | '`') | (None, ';' | '&' | '|' | '<' | '>' | '(' | ')') => {
                    meant = meant.or(Some(c));
                }
                (None, '~') if before.is_whitespace() || "=:".contains(before) => meant = meant.or(Some(c)),
                _ => {}
            }
            before = c;
        }
        meant
    }

    fn open(&self) -> bool {
        self.open.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_istioctl_and_people_write_is_read() {
        let text = "# made by a tool\n\nA='b c'\nexport B=\"d\" # why\nC=\nD='{\"app\":\"x\",\"y\":\"$z\"}'\nE='two\nlines'\nF=a#b\nG='it'\\''s'\n";
        let pairs = parse("cluster.env", text).unwrap();
        let pairs: Vec<(&str, &str)> = pairs.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
        let json = r#"{"app":"x","y":"$z"}"#;
        let all = [
            ("A", "b c"),
            ("B", "d"),
            ("C", ""),
            ("D", json),
            ("E", "two\nlines"),
            ("F", "a#b"),
            ("G", "it's"),
        ];
        assert_eq!(pairs, all);
    }

    #[test]
    fn a_backslash_joins_lines_and_what_only_a_shell_reads_so_is_refused() {
        let text = "A=b\\\n#c\nexport B=1 \\\n  C=\"x\\\ny\"\nD=a~b\nE='a;b(~)' # ; & |\nF=a\\;b\n";
        let pairs = parse("f", text).unwrap();
        let pairs: Vec<(&str, &str)> = pairs.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
        let all = [("A", "b#c"), ("B", "1"), ("C", "xy"), ("D", "a~b"), ("E", "a;b(~)"), ("F", "a;b")];
        assert_eq!(pairs, all);
        for (text, part) in [
            ("\nA=shop; B=1\n", "f:2: ; means something to a shell"),
            ("A=b&\n", "f:1: & means"),
            ("A=(b c)\n", "f:1: ( means"),
            ("A=b|c\n", "f:1: | means"),
            ("A=<x\n", "f:1: < means"),
            ("A=~/x\n", "f:1: ~ means"),
            ("A=x:~y\n", "f:1: ~ means"),
            ("B=1\nA=b\\", "f:2: nothing follows the backslash"),
        ] {
            let errors = parse("f", text).unwrap_err();
            assert!(errors.len() == 1 && errors[0].starts_with(part), "{text:?}: {errors:?}");
        }
    }

    #[test]
    fn every_fault_is_told_with_its_line_and_no_value() {
        let text = "A=$(hostname)\nset -e\nB=\"${C}\"\n1X=secret-value-that-is-long-enough\nD='open\n";
        let errors = parse("f", text).unwrap_err();
        assert_eq!(errors.len(), 6, "{errors:?}");
        assert!(errors[0].starts_with("f:1: only a shell") && errors[5].starts_with("f:5: a quote"));
        assert!(errors.iter().all(|e| !e.contains("long-enough")), "{errors:?}");
    }
}
