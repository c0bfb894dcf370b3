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
        let mut computed = quotes.read(line);
        // A quoted value may go on in the next line.
        while quotes.open() {
            let Some((_, more)) = lines.next() else { break };
            computed |= quotes.read(more);
            logical.push('\n');
            logical.push_str(more);
        }
        let place = format!("{name}:{}", at + 1);
        if quotes.open() {
            errors.push(format!("{place}: a quote is not closed"));
            break;
        }
        if computed {
            errors.push(format!(
                "{place}: only a shell can compute $ and `: write the value itself, in single quotes if it has such a character"
            ));
            continue;
        }
        for word in shlex::Shlex::new(&logical) {
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
struct Quotes(Option<char>);

impl Quotes {
    // Whether the line holds something that a shell would compute.
    fn read(&mut self, line: &str) -> bool {
        let mut computed = false;
        let mut before = ' ';
        let mut chars = line.chars();
        while let Some(c) = chars.next() {
            match (self.0, c) {
                (None | Some('"'), '\\') => drop(chars.next()),
                (None, '#') if before.is_whitespace() => return computed,
                (None, '\'' | '"') => self.0 = Some(c),
                (Some(open), _) if c == open => self.0 = None,
                (None | Some('"'), '$' | '`') => computed = true,
                _ => {}
            }
            before = c;
        }
        computed
    }

    fn open(&self) -> bool {
        self.0.is_some()
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
    fn every_fault_is_told_with_its_line_and_no_value() {
        let text = "A=$(hostname)\nset -e\nB=\"${C}\"\n1X=secret-value-that-is-long-enough\nD='open\n";
        let errors = parse("f", text).unwrap_err();
        assert_eq!(errors.len(), 6, "{errors:?}");
        assert!(errors[0].starts_with("f:1: only a shell") && errors[5].starts_with("f:5: a quote"));
        assert!(errors.iter().all(|e| !e.contains("long-enough")), "{errors:?}");
    }
}
