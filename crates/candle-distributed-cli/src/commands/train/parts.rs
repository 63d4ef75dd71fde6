//! The options of `train` for a model in parts.

use candle_distributed::{
    finetune::cost::{Keep, Sharding},
    mesh::{DeviceMesh, DeviceMeshBuilder},
    types::WorldSize,
};

use crate::{
    error::{Error, Result},
    help,
    strategy::StrategyArgs,
};

/// How the model is sharded, if it is.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct ShardingArgs {
    #[command(flatten)]
    what: StrategyArgs,
    /// What each unit of a sharded model keeps from its forward to its backward pass [default:
    /// inputs]
    #[arg(long, value_enum, help_heading = "Sharding")]
    keep: Option<Keep>,
    /// Number of units gathered ahead of the one in use, while that is computed [default: 0]
    #[arg(long, value_name = "UNITS", help_heading = "Sharding")]
    prefetch: Option<usize>,
    /// Run the optimizer of each unit of a sharded model inside the backward pass, so that
    /// gradients of all of it are never there at once
    #[arg(long, visible_alias = "optimizer-in-bwd", help_heading = "Sharding")]
    optimizer_in_backward: bool,
}

impl ShardingArgs {
    /// How the model is to be sharded over so many devices, if it is.
    pub(super) fn asked(&self, world_size: WorldSize) -> Result<Option<Sharding>> {
        let Some(strategy) = self.what.asked()? else {
            return match self.option_of_parts() {
                Some(option) => Err(Error::usage(format!(
                    "{option} needs a --strategy: without one every device has the whole model"
                ))),
                None => Ok(None),
            };
        };
        let replicas = self.what.replicas();
        if self.devices_of_copy(world_size).is_none() {
            return Err(Error::usage(format!(
                "--replicas {replicas} does not divide the {world_size} devices"
            )));
        }
        Ok(Some(Sharding {
            strategy,
            keep: self.keep.unwrap_or(Keep::Inputs),
            replicas,
            prefetch: self.prefetch.unwrap_or(0),
            optimizer_in_backward: self.optimizer_in_backward,
        }))
    }

    /// How many of the devices share a copy of the model, if copies divide them.
    fn devices_of_copy(&self, world_size: WorldSize) -> Option<usize> {
        let replicas = usize::try_from(self.what.replicas()).ok()?;
        let devices = world_size.as_usize().checked_div(replicas)?;
        (devices * replicas == world_size.as_usize()).then_some(devices)
    }

    /// The axes of the devices: those that share a copy of the model are neighbors, along the last
    /// one.
    ///
    /// They follow from the options alone. A process that cannot start meets those that can.
    pub(super) fn grid(&self, world_size: WorldSize) -> DeviceMeshBuilder {
        let grid = DeviceMesh::builder();
        let devices = world_size.as_usize();
        match self.devices_of_copy(world_size) {
            Some(of_copy) if of_copy < devices => {
                grid.axis("replicas", devices / of_copy).axis("shards", of_copy)
            }
            // What does not divide them is refused when the run starts.
            Some(_) | None => grid.axis(DeviceMesh::AXIS, devices),
        }
    }

    /// An option that has no meaning for a model that is whole, if one is given.
    fn option_of_parts(&self) -> Option<&'static str> {
        let options = [
            ("--replicas", self.what.replicas.is_some()),
            ("--keep", self.keep.is_some()),
            ("--prefetch", self.prefetch.is_some()),
            ("--optimizer-in-backward", self.optimizer_in_backward),
        ];
        options.into_iter().find_map(|(option, is_given)| is_given.then_some(option))
    }

    /// The options as they are typed when the run is resumed, each with a space before it.
    pub(super) fn typed(&self) -> String {
        let keep = self.keep.map(|keep| format!(" --keep {}", help::typed(keep)));
        let prefetch = self.prefetch.map(|units| format!(" --prefetch {units}"));
        let in_backward = self.optimizer_in_backward.then(|| " --optimizer-in-backward".to_owned());
        let options = [Some(self.what.typed()), keep, prefetch, in_backward];
        options.into_iter().flatten().collect()
    }
}
