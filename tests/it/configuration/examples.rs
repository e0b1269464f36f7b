//! `conf/*.toml` against the programs: the documents name every setting, its default and its range.

use super::{CELL, PROXY, Program, loads};
use queen_proxy::config::reserved;
use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

/// One `# key = value` of a document.
struct Setting {
    group: String,
    key: String,
    /// The value as the programs read it, from either kind of TOML value.
    value: String,
    /// The comment above it, as one line.
    comment: String,
    comment_lines: usize,
}

impl Setting {
    /// The variable that the comment names.
    fn variable(&self) -> &str {
        let name = self.comment.rsplit_once("Variable: ").and_then(|(_, name)| name.strip_suffix('.'));
        name.unwrap_or_else(|| panic!("{}: the comment names no variable: {}", self.key, self.comment))
    }

    /// The range that the comment names.
    fn range(&self) -> Option<(i128, i128)> {
        let text = self.comment.split_once("Range: ")?.1.split_once('.')?.0;
        if text == "0 and up" {
            return Some((0, u64::MAX.into()));
        }
        let (least, most) = text.split_once(" to ")?;
        Some((least.parse().ok()?, most.parse().ok()?))
    }
}

fn text(program: &Program) -> String {
    std::fs::read_to_string(program.example).unwrap()
}

/// The `key = value` in a line that is commented out.
fn commented_out(line: &str) -> Option<(String, String)> {
    let (key, _) = line.strip_prefix("# ")?.split_once(" = ")?;
    if !key.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_') {
        return None;
    }
    let table: toml::Table =
        line[2..].parse().unwrap_or_else(|_| panic!("not TOML when un-commented: {line}"));
    let value = match &table[key] {
        toml::Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    Some((key.to_owned(), value))
}

fn settings(program: &Program) -> Vec<Setting> {
    let (mut group, mut comment, mut found) = (String::new(), Vec::new(), Vec::new());
    for line in text(program).lines() {
        if let Some(name) = line.strip_prefix("# --- ") {
            name.trim_end_matches('-').trim().clone_into(&mut group);
        } else if let Some((key, value)) = commented_out(line) {
            let comment_lines = comment.len();
            let comment = std::mem::take(&mut comment).join(" ");
            found.push(Setting { group: group.clone(), key, value, comment, comment_lines });
        } else if let Some(text) = line.strip_prefix("# ") {
            comment.push(text.to_owned());
        } else {
            comment.clear();
        }
    }
    found
}

fn values(
    program: &Program,
    environment: &[(&str, &str)],
    file: Option<&Path>,
) -> BTreeMap<&'static str, String> {
    let (_, shown) = program.load(environment, file).unwrap();
    shown.into_iter().map(|line| (line.name, line.value)).collect()
}

/// The key of a variable, by the rule that `source.rs` states.
fn key(program: &Program, variable: &str) -> String {
    variable.strip_prefix(program.prefix).unwrap_or(variable).to_ascii_lowercase()
}

#[test]
fn as_they_are_they_change_nothing() {
    for program in [&PROXY, &CELL] {
        let (without, shown) = program.load(&[], None).unwrap();
        let (with, shown_with) = program.load(&[], Some(Path::new(program.example))).unwrap();
        assert_eq!(with, without);
        assert_eq!(format!("{shown_with:?}"), format!("{shown:?}"));
        let output = program.run(&["check", "--config", program.example], &[]);
        assert_eq!(output.0, 0, "{}", output.1);
    }
}

#[test]
fn uncommented_they_are_accepted_and_still_change_nothing() {
    for program in [&PROXY, &CELL] {
        let uncommented: Vec<String> = text(program)
            .lines()
            .map(|line| if commented_out(line).is_some() { line[2..].to_owned() } else { line.to_owned() })
            .collect();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("uncommented.toml");
        std::fs::write(&path, uncommented.join("\n")).unwrap();
        // With both kinds of service, so that every value has a place in the configuration.
        let cell: &[_] =
            if program.name == "queen-proxy" { &[("QUEEN_PROXY_DEV_CELL_URL", "http://c")] } else { &[] };
        let (without, _) = program.load(cell, None).unwrap();
        let (with, shown) = program.load(cell, Some(&path)).unwrap_or_else(|errors| panic!("{errors:#?}"));
        assert_eq!(with, without, "{}", program.example);
        assert!(shown.len() > 15);

        let (defaults, mut documented) = (values(program, cell, None), values(program, cell, Some(&path)));
        // `check` shows this one empty when nobody has set it; the configurations above agree on it.
        if let Some(tenant) = documented.get_mut("QUEEN_PROXY_DEV_TENANT") {
            tenant.clear();
        }
        assert_eq!(documented, defaults, "{}", program.example);
    }
}

#[test]
fn each_names_exactly_the_settings_there_are() {
    for program in [&PROXY, &CELL] {
        let defaults = values(program, &[], None);
        // A setting is a secret when the program knows a key for its file.
        let all_files: Vec<String> =
            defaults.keys().map(|name| format!("{}_file = \"\"", key(program, name))).collect();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("files.toml");
        std::fs::write(&path, all_files.join("\n")).unwrap();
        let unknown = program.load(&[], Some(&path)).unwrap_err();
        let files: Vec<String> = defaults
            .keys()
            .map(|name| format!("{name}_FILE"))
            .filter(|name| {
                let complaint = format!("{}: there is no such", key(program, name));
                !unknown.iter().any(|error| error.starts_with(&complaint))
            })
            .collect();
        assert!(files.len() >= 2 && files.len() < 10, "{files:?}");

        let there: BTreeSet<String> = defaults.keys().map(|&name| name.to_owned()).chain(files).collect();
        let settings = settings(program);
        let named: BTreeSet<String> = settings.iter().map(|setting| setting.variable().to_owned()).collect();
        assert_eq!(named, there, "{}", program.example);
        assert_eq!(settings.len(), there.len(), "{}: something is there twice", program.example);
        for setting in &settings {
            assert_eq!(setting.key, key(program, setting.variable()), "{}", setting.comment);
            assert!((1..=3).contains(&setting.comment_lines) && !setting.group.is_empty(), "{}", setting.key);
        }
    }
}

#[test]
fn each_documented_default_and_range_is_the_real_one() {
    for program in [&PROXY, &CELL] {
        let defaults = values(program, &[], None);
        let mut ranges = 0;
        for setting in settings(program) {
            let variable = setting.variable();
            let Some(default) = defaults.get(variable) else { continue };
            let number = default.parse::<u64>().is_ok();
            match variable {
                // This one has to be set, and is for the tests.
                "PXDB_HOST" => assert_eq!(setting.value, ""),
                // The defaults of these depend on the machine, and show only when in force.
                "QUEEN_PROXY_WORKER_THREADS" | "QUEEN_PROXY_DEV_TENANT" => {}
                _ => assert_eq!(&setting.value, default, "{variable}"),
            }
            assert_eq!(setting.range().is_some(), number, "{variable}: {}", setting.comment);
            let Some((least, most)) = setting.range() else { continue };
            ranges += 1;
            for value in [least, most] {
                let value = value.to_string();
                assert!(program.load(&[(variable, &value)], None).is_ok(), "{variable}={value}");
            }
            for value in [least - 1, most + 1] {
                let value = value.to_string();
                let errors = program.load(&[(variable, &value)], None).unwrap_err();
                assert!(
                    errors.len() == 1 && errors[0].starts_with(&format!("{variable}: ")),
                    "{value}: {errors:?}"
                );
                if !setting.comment.contains("0 and up") {
                    assert!(errors[0].ends_with(&format!("from {least} to {most}")), "{errors:?}");
                }
            }
        }
        assert!(ranges >= 8, "{ranges}");
    }
}

#[test]
fn the_groups_without_effect_are_told_apart() {
    let of_group = |beginning: &str| -> BTreeSet<String> {
        let settings = settings(&PROXY);
        let chosen = settings.iter().filter(|setting| setting.group.starts_with(beginning));
        chosen.map(|setting| setting.variable().to_owned()).collect()
    };
    let defaults = values(&PROXY, &[], None);
    let mut without_effect = BTreeSet::new();
    for (name, default) in &defaults {
        let value = if default.is_empty() { "x" } else { default };
        match PROXY.load(&[(name, value)], None) {
            Ok((_, shown)) => without_effect.extend(reserved::set_in_vain(&shown)),
            Err(errors) => {
                let refused = ["must be", "not an Ed25519", "has at least 32 bytes", ": needs "]
                    .iter()
                    .any(|text| errors[0].contains(text));
                assert!(refused, "{errors:?}");
            }
        }
    }
    let documented = of_group("No effect in this version");
    let (files, documented): (BTreeSet<_>, BTreeSet<_>) =
        documented.into_iter().partition(|name| name.ends_with("_FILE"));
    assert_eq!(documented, without_effect.into_iter().map(str::to_owned).collect());
    assert!(files.iter().all(|file| documented.contains(file.trim_end_matches("_FILE"))), "{files:?}");
    assert_eq!(reserved::set_in_vain(&loads(&PROXY, &[])).count(), 0, "nobody set anything");
}
