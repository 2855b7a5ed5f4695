//! What an API server says of an object before it asks the rules: types and bounds, in its words.

use std::collections::BTreeSet;

use regex::Regex;
use serde_json::{Map, Value};

/// Sets what has a default and is not set; a null is not set.
pub(crate) fn fill(schema: &Value, value: &mut Value) {
    match value {
        Value::Object(fields) => {
            fields.retain(|_, field| !field.is_null());
            for (name, schema) in schema["properties"].as_object().into_iter().flatten() {
                if let default @ (Value::Bool(_) | Value::String(_) | Value::Array(_)) =
                    &schema["default"]
                {
                    fields.entry(name).or_insert_with(|| default.clone());
                }
            }
            for (name, field) in fields {
                fill(&schema["properties"][name], field);
            }
        }
        Value::Array(items) => items.iter_mut().for_each(|i| fill(&schema["items"], i)),
        _ => {}
    }
}

/// What is wrong with the value at this path.
pub(crate) fn judge(schema: &Value, value: &Value, at: &str, said: &mut Vec<String>) {
    let mut say = |words: String| said.push(format!("{at}: {words}"));
    let bound = |name: &str| schema[name].as_u64().and_then(|n| usize::try_from(n).ok());
    let most = |name, length| bound(name).filter(|most| length > *most);
    let least = |name, length| bound(name).filter(|least| length < *least);
    let is_of_type = match schema["type"].as_str() {
        Some("string") => value.is_string(),
        Some("boolean") => value.is_boolean(),
        Some("integer") => value.is_i64() || value.is_u64(),
        Some("number") => value.is_number(),
        Some("array") => value.is_array(),
        Some("object") => value.is_object(),
        _ => true,
    };
    if !is_of_type {
        return say(format!("must be of type {}", schema["type"]));
    }
    if let Some(words) = schema["enum"].as_array().filter(|all| !all.contains(value)) {
        let words: Vec<_> = words.iter().map(Value::to_string).collect();
        say(format!("supported values: {}", words.join(", ")));
    }
    match value {
        Value::String(text) => {
            if let Some(most) = most("maxLength", text.chars().count()) {
                say(format!("Too long: may not be more than {most} bytes"));
            }
            if let Some(least) = least("minLength", text.chars().count()) {
                say(format!("should be at least {least} chars long"));
            }
            let pattern = schema["pattern"].as_str();
            if pattern.is_some_and(|p| !Regex::new(p).unwrap().is_match(text)) {
                say(format!("should match '{}'", pattern.unwrap_or_default()));
            }
        }
        Value::Number(number) => {
            let (number, of) = (number.as_f64(), |name: &str| schema[name].as_f64());
            if let Some(most) = of("maximum").filter(|most| number > Some(*most)) {
                say(format!("should be less than or equal to {most}"));
            }
            if let Some(least) = of("minimum").filter(|least| number < Some(*least)) {
                say(format!("should be greater than or equal to {least}"));
            }
        }
        Value::Array(items) => {
            if let Some(most) = most("maxItems", items.len()) {
                say(format!(
                    "Too many: {}: must have at most {most} items",
                    items.len()
                ));
            }
            if let Some(least) = least("minItems", items.len()) {
                say(format!("should have at least {least} items"));
            }
            judge_items(schema, items, at, said);
        }
        Value::Object(fields) => {
            if let Some(most) = most("maxProperties", fields.len()) {
                say(format!(
                    "Too many: {}: must have at most {most} items",
                    fields.len()
                ));
            }
            judge_fields(schema, fields, at, said);
        }
        _ => {}
    }
}

fn judge_items(schema: &Value, items: &[Value], at: &str, said: &mut Vec<String>) {
    let keys = schema["x-kubernetes-list-map-keys"].as_array();
    let identity = |item: &Value| match (keys, schema["x-kubernetes-list-type"].as_str()) {
        (Some(keys), _) => {
            let keys = keys.iter().filter_map(Value::as_str);
            Some(keys.map(|key| item[key].to_string()).collect::<String>())
        }
        (None, Some("set")) => Some(item.to_string()),
        _ => None,
    };
    let mut seen = BTreeSet::new();
    for (number, item) in items.iter().enumerate() {
        let at = format!("{at}[{number}]");
        if identity(item).is_some_and(|identity| !seen.insert(identity)) {
            said.push(format!("{at}: Duplicate value"));
        }
        judge(&schema["items"], item, &at, said);
    }
}

fn judge_fields(schema: &Value, fields: &Map<String, Value>, at: &str, said: &mut Vec<String>) {
    let required = schema["required"].as_array().into_iter().flatten();
    for name in required.filter_map(Value::as_str) {
        if !fields.contains_key(name) {
            said.push(format!("{at}.{name}: Required value"));
        }
    }
    for (name, field) in fields {
        let known = [&schema["properties"][name], &schema["additionalProperties"]];
        match known.into_iter().find(|schema| !schema.is_null()) {
            Some(schema) => judge(schema, field, &format!("{at}.{name}"), said),
            None => said.push(format!("unknown field \"{at}.{name}\"")),
        }
    }
}
