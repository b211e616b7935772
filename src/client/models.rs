//! Lists the models of a server, and finds a model by its name.

use anyhow::Result;
use serde_json::Value;

use super::connection::Connection;
use crate::error::Error;
use crate::text::quote;

/// The maximum number of models that an error message lists.
const MAX_LISTED: usize = 20;

/// A model that a server offers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServedModel {
    pub name: String,
    /// The context length in tokens, if the server reports it.
    pub context: Option<usize>,
    pub owner: Option<String>,
}

/// Lists the models of a server. Skips models that have no id.
pub fn list(connection: &Connection) -> Result<Vec<ServedModel>> {
    let json = connection.get("/models")?;
    Ok(json["data"].as_array().into_iter().flatten().filter_map(read).collect())
}

fn read(model: &Value) -> Option<ServedModel> {
    // Servers report the context length in different fields. In order: vLLM and inferno, OpenRouter, LM Studio,
    // llama-server.
    let fields =
        [&model["max_model_len"], &model["context_length"], &model["max_context_length"], &model["meta"]["n_ctx"]];
    Some(ServedModel {
        name: model["id"].as_str()?.to_string(),
        context: fields.into_iter().find_map(Value::as_u64).map(|tokens| tokens as usize),
        owner: model["owned_by"].as_str().map(str::to_string),
    })
}

/// Finds the model with the name `name`, or else the only model whose name contains `name`.
/// Fails if no model matches, or if several names contain `name` and none equals it.
pub fn find<'m>(models: &'m [ServedModel], name: &str, connection: &Connection) -> Result<&'m ServedModel> {
    if let Some(model) = models.iter().find(|model| model.name == name) {
        return Ok(model);
    }
    let mut matches = models.iter().filter(|model| model.name.contains(name));
    match (matches.next(), matches.next()) {
        (Some(model), None) => Ok(model),
        _ => Err(not_served(models, name, connection)),
    }
}

fn not_served(models: &[ServedModel], name: &str, connection: &Connection) -> anyhow::Error {
    let mut names: Vec<String> = models.iter().take(MAX_LISTED).map(|model| quote(&model.name)).collect();
    if models.len() > MAX_LISTED {
        names.push("…".to_string());
    }
    let hint = if names.is_empty() {
        "the server lists no models".to_string()
    } else {
        format!("it serves {}", names.join(", "))
    };
    Error::ModelNotServed { model: name.to_string(), url: connection.url.to_string(), hint }.into()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::address::ServerUrl;
    use super::*;

    #[test]
    fn models_are_found_by_a_unique_part_of_their_name() {
        let connection = Connection::new(ServerUrl::parse("http://127.0.0.1:1").unwrap(), None, None).unwrap();
        let models: Vec<ServedModel> = [
            json!({ "id": "openai/gpt-oss-20b", "max_model_len": 4096, "owned_by": "vllm" }),
            json!({ "id": "openai/gpt-oss-120b", "meta": { "n_ctx": 512, "n_ctx_train": 9 } }),
            json!({ "object": "model" }),
        ]
        .iter()
        .filter_map(read)
        .collect();
        assert_eq!(models.iter().map(|model| model.context).collect::<Vec<_>>(), [Some(4096), Some(512)]);
        assert_eq!(find(&models, "120b", &connection).unwrap().name, "openai/gpt-oss-120b");
        let error = find(&models, "gpt-oss", &connection).unwrap_err().to_string();
        assert!(error.contains("it serves 'openai/gpt-oss-20b', 'openai/gpt-oss-120b'"), "{error}");
        assert!(find(&[], "x", &connection).unwrap_err().to_string().contains("lists no models"));
    }
}
