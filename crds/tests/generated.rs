//! The committed YAML of the custom resources, in both places, says what the types say.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on ends")]

use std::{collections::BTreeSet, fs, path::Path};

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use serde_json::Value;
use windtunnel_crds::{definitions, names::GROUP};

#[test]
fn generated_definitions_are_fresh() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for folder in ["generated", "../charts/windtunnel/crds"] {
        for crd in definitions() {
            let file = root
                .join(folder)
                .join(format!("{}.{GROUP}.yaml", crd.spec.names.plural));
            let text = fs::read_to_string(&file).unwrap();
            let committed: CustomResourceDefinition = serde_saphyr::from_str(&text).unwrap();
            assert!(
                serde_json::to_value(&committed).unwrap() == serde_json::to_value(&crd).unwrap(),
                "{} is stale: run `cargo lab generate`",
                file.display()
            );
        }
    }
}

/// The text of doc comments as a reader sees it.
fn plain(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The descriptions of a schema's properties with their names, at any depth; those of lists' items
/// have none.
fn descriptions(schema: &Value, found: &mut BTreeSet<(String, String)>) {
    let described = |schema: &Value| plain(schema["description"].as_str().unwrap_or_default());
    for (name, property) in schema["properties"].as_object().into_iter().flatten() {
        found.insert((name.clone(), described(property)));
        descriptions(property, found);
    }
    if let items @ Value::Object(_) = &schema["items"] {
        found.insert((String::new(), described(items)));
        descriptions(items, found);
    }
}

/// The doc comments in the types' source with the name of the field that they are of, as the API
/// spells it; types have none.
fn comments() -> Vec<(String, String)> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let (mut found, mut folders) = (Vec::new(), vec![source]);
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else {
                comments_of(&fs::read_to_string(path).unwrap(), &mut found);
            }
        }
    }
    found
}

fn comments_of(source: &str, found: &mut Vec<(String, String)>) {
    let (mut comment, mut is_of_schema) = (String::new(), false);
    for line in source.lines() {
        let code = line.trim();
        let field = line
            .strip_prefix("    pub ")
            .and_then(|l| l.split_once(": "));
        if let Some(text) = code.strip_prefix("///") {
            comment.push_str(text);
        } else if line.starts_with("#[derive(") {
            is_of_schema = line.contains("KubeSchema");
        } else if code.starts_with("KubeSchema,") {
            is_of_schema = true;
        } else if line.starts_with("pub struct") && is_of_schema && line.ends_with('{') {
            found.push((String::new(), plain(&comment)));
        } else if let (Some((name, _)), true) = (field, is_of_schema) {
            let mut words = name.split('_');
            let first = words.next().unwrap_or_default().to_owned();
            let name = words.fold(first, |name, word| {
                let (head, rest) = word.split_at(1);
                name + &head.to_uppercase() + rest
            });
            found.push((name, plain(&comment)));
        } else if line.starts_with('}') {
            is_of_schema = false;
        }
        let goes_on =
            code.starts_with("///") || code.starts_with("#[") || line.starts_with("        ");
        if !goes_on && !code.starts_with(')') && !code.starts_with('.') && !code.starts_with('"') {
            comment.clear();
        }
    }
}

/// What `kubectl explain` says of a field is what stands above it in the source; and no more than one
/// sentence above a type is hidden from it.
#[test]
fn every_comment_of_a_field_is_its_description() {
    let mut shown = BTreeSet::new();
    for crd in definitions() {
        let schema = serde_json::to_value(&crd.spec.versions[0].schema).unwrap();
        descriptions(&schema["openAPIV3Schema"], &mut shown);
    }
    let comments = comments();
    let (types, fields): (Vec<_>, Vec<_>) = comments.iter().partition(|(name, _)| name.is_empty());
    assert!(fields.len() > 150, "{}", fields.len());
    for comment in fields {
        assert!(shown.contains(comment), "{}: {:?}", comment.0, comment.1);
    }
    for (_, comment) in types {
        let is_shown = shown.iter().any(|(_, text)| text == comment);
        assert!(is_shown || !comment.contains(". "), "{comment:?}");
    }
}
