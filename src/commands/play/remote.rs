//! Finds the models of a server, for `inferno play --url`.

use std::rc::Rc;

use anyhow::Result;

use super::args::{Args, Reparse, Selected};
use super::choice::choose;
use crate::client::{self, Connection, RemoteModel, ServedModel, ServerUrl};
use crate::commands::shared::{api_keys, note};
use crate::conversation::{LoadedModel, ModelId, ModelSource};
use crate::engine::SamplingParams;
use crate::error::Error;
use crate::terminal;
use crate::text::{counted, printable};

/// Finds the requested model on the server at `url`.
///
/// If no model was requested, or if the server does not have the model of the resumed conversation, selects a model
/// with [`default_model`]. Returns `None` if the user quits.
/// Fails if the server lists no models, or if it does not have the model that the user named on the command line.
pub fn select(url: &str, args: &Args, is_one_shot: bool) -> Result<Option<Selected>> {
    let url = ServerUrl::parse(url).map_err(Error::usage)?;
    let key = api_keys::read(args.api_key.as_slice())?.into_iter().next();
    let connection = Rc::new(Connection::new(url, key, args.ca_cert.as_deref())?);
    let models = client::list(&connection)?;
    let found = args.model.as_deref().map(|name| client::find(&models, name, &connection));
    let model = match found {
        Some(Ok(model)) => model,
        Some(Err(error)) if args.origin.is_model_typed => return Err(error),
        // With `Some(Err(_))`, the name is from a resumed conversation, and this server does not have the model.
        Some(Err(_)) | None => match default_model(&models, &connection, is_one_shot)? {
            Some(model) => model,
            None => return Ok(None),
        },
    };
    let name = model.name.clone();
    let source = move |reparse| Rc::new(ServerModels { connection, reparse }) as Rc<dyn ModelSource>;
    Ok(Some(Selected { model: ModelId::Remote(name), typed_revision: None, source: Box::new(source) }))
}

/// Returns the only model of a server. If there are several, fails for a one-shot answer,
/// and otherwise asks the user to choose a model. Returns `None` if the user quits.
/// Fails if the server lists no models.
fn default_model<'m>(
    models: &'m [ServedModel],
    connection: &Connection,
    is_one_shot: bool,
) -> Result<Option<&'m ServedModel>> {
    let names: Vec<&str> = models.iter().map(|model| model.name.as_str()).collect();
    match names.len() {
        0 => Err(anyhow::anyhow!("cannot chat: the server at {} lists no models", connection.url)),
        1 => Ok(models.first()),
        _ if is_one_shot => Err(Error::usage(format!(
            "no model given: name one of the models on the server: {}",
            printable(&names.join(", "))
        ))),
        _ => {
            for (index, name) in names.iter().enumerate() {
                terminal::write_stderr(&format!("{:3}  {}\n", index + 1, printable(name)));
            }
            Ok(choose(&names)?.map(|index| &models[index]))
        }
    }
}

/// The models of a server. Loading a model applies the configuration file's settings for that model.
struct ServerModels {
    connection: Rc<Connection>,
    reparse: Box<Reparse>,
}

impl ModelSource for ServerModels {
    fn find(&self, name: &str) -> Result<ModelId> {
        let models = client::list(&self.connection)?;
        let model = client::find(&models, name, &self.connection)?;
        // Parse the new model's settings now, to report invalid settings while the old model is still in use.
        (self.reparse)(&model.name)?;
        Ok(ModelId::Remote(model.name.clone()))
    }

    fn load(&self, model: &ModelId) -> Result<LoadedModel> {
        let models = client::list(&self.connection)?;
        let model = client::find(&models, model.name(), &self.connection)?.clone();
        let args = (self.reparse)(&model.name)?;
        introduce(&model, &self.connection);
        let sampling = args.sampling.apply_to(&SamplingParams::greedy())?;
        let backend = Box::new(RemoteModel::new(self.connection.clone(), model));
        Ok(LoadedModel { sampling, backend, configured: args.origin.configured })
    }

    fn names(&self) -> Vec<String> {
        client::list(&self.connection).into_iter().flatten().map(|model| model.name).collect()
    }
}

/// Prints a summary of the model to stderr, if stderr is a terminal.
fn introduce(model: &ServedModel, connection: &Connection) {
    let context = model.context.map_or_else(String::new, |tokens| format!(" · context {}", counted(tokens, "token")));
    note(&printable(&format!("{} at {}{context}", model.name, connection.url)));
}
